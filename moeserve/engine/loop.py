"""The step loop of a rank. Read this first.

All ranks run this loop and meet in its collectives: once in the agreement, then in every MoE layer.
A rank without work takes part with no tokens. When no rank has work all go idle and wait for mail;
who wakes tells the others which step it enters.

May not be added here: anything that knows a model, a kernel, a transport or a quantisation. When
steps come to overlap, that is a second function beside ``step``, and tests compare their output.
"""

from __future__ import annotations

from collections.abc import Sequence

from moeserve import messages
from moeserve.control.controller import Controller
from moeserve.engine.batches import BatchBuilder
from moeserve.engine.channel import Channel, Mail
from moeserve.engine.observer import Observer
from moeserve.engine.runner import ModelRunner
from moeserve.engine.sampler import Sampler
from moeserve.engine.scheduler import Scheduler
from moeserve.parallel.agreement import Agreement


class EngineLoop:
    """One rank's loop over its parts; the parts own all state but the step number."""

    def __init__(
        self,
        *,
        channel: Channel,
        scheduler: Scheduler,
        agreement: Agreement,
        batches: BatchBuilder,
        runner: ModelRunner,
        sampler: Sampler,
        controller: Controller,
        observer: Observer,
    ) -> None:
        self._channel = channel
        self._scheduler = scheduler
        self._agreement = agreement
        self._batches = batches
        self._runner = runner
        self._sampler = sampler
        self._controller = controller
        self._observer = observer
        self._step = 0
        self._stopping = False

    def run(self) -> None:
        """Steps until all ranks agreed to stop."""
        while self.step():
            pass

    def step(self) -> bool:
        """One step of all ranks; False when they agreed to leave."""
        for mail in self._channel.drain():
            self._handle(mail)
        plan = self._scheduler.schedule()  # who gets how many tokens, in which KV blocks
        self._controller.prepare()
        sizes = self._agreement.exchange(
            plan.num_tokens,
            has_work=self._has_work,
            stop=self._stopping,
            offer=self._controller.offer(),
        )  # every rank answers, idle ones with 0
        self._step += 1
        if sizes.stop:
            return False
        self._controller.follow(sizes)  # finished moves take effect, orders are heard
        if not sizes.has_work:
            self._idle()
            return True
        outputs = self._scheduler.take_refused()
        if sizes.total:
            batch = self._batches.build(plan, sizes)  # complete and frozen
            logits = self._runner.forward(batch)  # dispatch and combine happen inside
            sampled = self._sampler.sample(logits, plan.sampling)
            outputs += self._scheduler.update(plan, sampled)
        self._controller.tick()  # experts on their way move on by a few bytes
        self._observer.publish(self._step, outputs)
        return True

    def _idle(self) -> None:
        """Checks the accounts, then waits for mail that makes work, here or at a peer."""
        self._runner.check()
        self._scheduler.check()
        self._observer.publish(self._step, self._scheduler.take_refused(), to_all=True)
        while True:
            mail = self._channel.wait(self._controller.poll_s)
            for item in mail:
                self._handle(item)
            self._controller.prepare()
            if self._has_work or self._stopping:
                self._channel.wake_peers(self._step)
                return
            self._observer.publish(self._step, self._scheduler.take_refused())
            if self._woken(mail):
                return

    @property
    def _has_work(self) -> bool:
        return self._scheduler.has_unfinished or self._controller.has_work

    def _woken(self, mail: Sequence[Mail]) -> bool:
        """Whether a peer enters the step that this rank enters next (older news is stale)."""
        wakes = (m.message.step for m in mail if isinstance(m.message, messages.Wake))
        return any(step >= self._step for step in wakes)

    def _handle(self, mail: Mail) -> None:
        match mail.message:
            case messages.NewRequest() as request:
                self._scheduler.add(request, mail.source)
            case messages.Abort(request_ids):
                self._scheduler.abort(request_ids)
            case messages.Shutdown():
                self._stopping = True
            case messages.Wake():
                pass  # see _woken; a rank that is not idle enters the step anyway
            case messages.Hello() | messages.Query() | messages.Command() as question:
                self._observer.answer(mail.source, question)
