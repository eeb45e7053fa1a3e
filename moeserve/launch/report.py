"""What a person sees when an instance has started: phases with seconds, facts, address, a try."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from moeserve.launch.children import Child


def print_startup(
    console: Console, ranks: Sequence[Child], http: Sequence[Child], seconds: float
) -> None:
    """Prints a table: a row a phase, a column a process; then what the ranks found out."""
    table = Table(title=f"Ready after {seconds:.1f} s", title_justify="left", box=None)
    table.add_column("phase")
    children = [*ranks, *http]
    for child in children:
        table.add_column(f"{child.name} (s)", justify="right")
    names = dict.fromkeys(phase.name for child in children for phase in child.phases)
    for name in names:
        spent = [
            sum(phase.seconds for phase in child.phases if phase.name == name) for child in children
        ]
        table.add_row(name, *(f"{s:.2f}" if s else "" for s in spent))
    console.print(table)
    for child in children:
        for fact, value in (child.ready.facts if child.ready else {}).items():
            console.print(f"  {child.name}: {fact}: {value}", highlight=False)


def print_address(console: Console, address: tuple[str, int], *, has_key: bool) -> None:
    """Prints where the server is and a line to try it with."""
    host, port = address
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if has_key else ""
    console.print(f"\nServing on {url}   Try:", highlight=False)
    console.print(
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        '-d \'{"messages": [{"role": "user", "content": "Tell me a story about a fox."}]}\'',
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
