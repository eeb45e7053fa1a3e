"""``python -m moeserve_placement``: the commands of this library without the runtime."""

from moeserve_placement.cli.main import main

if __name__ == "__main__":
    main(prog_name="python -m moeserve_placement")
