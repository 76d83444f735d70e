"""A scheduler that answers a gateway with scripted tokens, over a real gRPC server in the test's process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np

from kvern.errors import KvernError
from kvern.rpc.packing import pack_i32, pack_u32, unpack_i32
from kvern.rpc.server import Server
from kvern.v1 import error_pb2, model_pb2, sampling_pb2, session_pb2, session_pb2_grpc


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Waits for what another task is about to do."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


Script = Callable[[session_pb2.Submit, int], Sequence[int]]


def counting(submit: session_pb2.Submit, choice: int) -> list[int]:
    """The default output: ids that depend on the prompt's length and the choice, never an end token."""
    start = len(unpack_i32(submit.prompt_token_ids)) + 100 * choice
    return [1000 + (start + i) % 40_000 for i in range(submit.params.max_tokens)]


@dataclass(eq=False)
class Request:
    """A submitted request; outputs are fixed at submit, positions advance as they are sent."""

    submit: session_pb2.Submit
    outputs: list[list[int]]
    sent: list[int]
    closed: set[int] = field(default_factory=set)


class FakeScheduler(session_pb2_grpc.SchedulerServiceServicer):
    """``step_s`` between steps; each gives every open choice ``tokens_per_step`` tokens, in one message.

    What gateways sent is kept in ``submits``, ``cancels`` and ``attaches``.
    """

    def __init__(
        self,
        script: Script = counting,
        *,
        vocab_size: int = 49_152,
        max_model_len: int = 2_048,
        eos_token_ids: Sequence[int] = (2,),
        step_s: float = 0.0,
        tokens_per_step: int = 1,
    ) -> None:
        self.script = script
        self.step_s = step_s
        self.tokens_per_step = tokens_per_step
        self.welcome = session_pb2.Welcome(
            cell="test",
            epoch=1,
            model=model_pb2.ModelInfo(
                name="test-model",
                architecture="llama",
                vocab_size=vocab_size,
                max_model_len=max_model_len,
                eos_token_ids=eos_token_ids,
            ),
            block_size=16,
            kv_capacity_tokens=100_000,
            prefix_caching=True,
        )
        self.submits: list[session_pb2.Submit] = []
        self.cancels: list[session_pb2.CancelHandle] = []
        self.attaches: list[session_pb2.Attach] = []
        self.refuse: KvernError | None = None
        # What is told of the queue; nothing, as by an older scheduler.
        self.room: int | None = None
        # The next message with tokens is none that a gateway can read.
        self.malformed = False
        # What requests for embeddings get.
        self.embed: Callable[[session_pb2.Submit], Sequence[float]] = lambda submit: ()
        # Every choice ends with this error instead of by length.
        self.ends_with: KvernError | None = None
        self.model_loaded = asyncio.Event()
        self.model_loaded.set()
        self.paused = asyncio.Event()
        self.paused.set()
        self.silent = False
        self.leads = True
        self.forget_on_reconnect = False
        self.num_sessions = 0
        # By request id, across sessions.
        self.requests: dict[str, Request] = {}
        self._server: Server | None = None
        self._calls: set[Any] = set()
        self.address = ""

    def register(self, server: grpc.aio.Server) -> None:
        """Other services that it has."""

    async def start(self, address: str = "127.0.0.1:0") -> str:
        self._server = Server(["kvern.v1.SchedulerService"])
        session_pb2_grpc.add_SchedulerServiceServicer_to_server(self, self._server.grpc)
        self.register(self._server.grpc)
        port = await self._server.start(address)
        self.address = f"127.0.0.1:{port}"
        await self._server.set_serving(True)
        return self.address

    async def stop(self) -> None:
        assert self._server is not None
        self.drop_sessions()
        await self._server.drain(0)

    def drop_sessions(self) -> None:
        """As if the scheduler's process had died and come back."""
        for session in list(self._calls):
            session.dropped.set()

    def tell_taken_over(self, request_id: str) -> None:
        """As if another gateway had attached to the request."""
        error = KvernError(error_pb2.ERROR_CODE_CANCELLED, "taken over", field="request_id")
        for session in self._calls:
            for handle, (request, _) in list(session.open.items()):
                if request.submit.request_id == request_id:
                    del session.open[handle]
                    session.answers.refused.add(handle=handle, error=error.to_pb())
                    session.wake.set()

    async def GetStatus(
        self, request: session_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> session_pb2.GetStatusResponse:
        while self.silent:
            await asyncio.sleep(0.05)
        return session_pb2.GetStatusResponse(leader=self.leads)

    async def Session(
        self, request_iterator: AsyncIterator[session_pb2.SessionRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[session_pb2.SessionResponse]:
        session = _Session(self)
        self._calls.add(session)
        reader = asyncio.create_task(session.read(request_iterator))
        self.num_sessions += 1
        if self.num_sessions > 1 and self.forget_on_reconnect:
            self.requests.clear()
        try:
            # A real scheduler says it when its first worker has loaded the model; there are heartbeats until then.
            while not self.model_loaded.is_set():
                yield session_pb2.SessionResponse()
                await asyncio.sleep(0.1)
            yield session_pb2.SessionResponse(welcome=self.welcome)
            while not session.dropped.is_set():
                response = await session.step()
                if session.dropped.is_set():
                    break
                yield response
            raise KvernError(error_pb2.ERROR_CODE_UNAVAILABLE, "the scheduler went away")
        finally:
            reader.cancel()
            self._calls.discard(session)


class _Session:
    def __init__(self, scheduler: FakeScheduler) -> None:
        self.scheduler = scheduler
        self.dropped = asyncio.Event()
        self.wake = asyncio.Event()
        self.open: dict[int, tuple[Request, int]] = {}
        self.answers = session_pb2.SessionResponse()

    async def read(self, requests: AsyncIterator[session_pb2.SessionRequest]) -> None:
        async for message in requests:
            # The order of the real one: a cancel is about what an earlier message said.
            for cancel in message.cancels:
                self.scheduler.cancels.append(cancel)
                self._cancel(cancel)
            for submit in message.submits:
                self._submit(submit)
            for attach in message.attaches:
                self._attach(attach)
            self.wake.set()

    def _cancel(self, cancel: session_pb2.CancelHandle) -> None:
        """What was sent stays; the end comes under the same handle."""
        request, choice = self.open.pop(cancel.handle, (None, 0))
        if request is not None:
            request.closed.add(choice)
            del request.outputs[choice][request.sent[choice] :]
            finished = self._finished(cancel.handle, request, choice)
            if not cancel.stopped:
                finished.reason = sampling_pb2.FINISH_REASON_ABORT
            self.answers.finished.append(finished)

    def _submit(self, submit: session_pb2.Submit) -> None:
        scheduler = self.scheduler
        known = scheduler.requests.get(submit.request_id)
        error = scheduler.refuse
        if known is not None and known.submit.body_digest != submit.body_digest:
            message = f"request id {submit.request_id} is in use with another body"
            error = KvernError(error_pb2.ERROR_CODE_REQUEST_ID_CONFLICT, message, field="request_id")
        if known is None and submit.resumes:
            error = KvernError(error_pb2.ERROR_CODE_REQUEST_NOT_FOUND, "no such request")
        scheduler.submits.append(submit)
        if error is not None:
            self.answers.refused.add(handle=submit.handle, error=error.to_pb())
            return
        if known is None:
            outputs = [list(scheduler.script(submit, choice)) for choice in range(submit.n)]
            known = scheduler.requests[submit.request_id] = Request(submit, outputs, [0] * submit.n)
        known.sent = [0] * submit.n
        self._admit(submit.handle, known)

    def _attach(self, attach: session_pb2.Attach) -> None:
        self.scheduler.attaches.append(attach)
        known = self.scheduler.requests.get(attach.request_id)
        if known is None:
            error = KvernError(error_pb2.ERROR_CODE_REQUEST_NOT_FOUND, "no such request")
            self.answers.refused.add(handle=attach.handle, error=error.to_pb())
            return
        known.sent = [*attach.next_index, *[0] * (known.submit.n - len(attach.next_index))]
        submit = known.submit
        self._admit(attach.handle, known)
        admitted = self.answers.admitted[-1]
        admitted.gateway_context, admitted.prompt_token_ids = submit.gateway_context, submit.prompt_token_ids
        admitted.params.CopyFrom(submit.params)
        admitted.n = submit.n

    def _admit(self, handle: int, request: Request) -> None:
        """Its events go nowhere else any more."""
        for session in self.scheduler._calls:
            session.open = {h: known for h, known in session.open.items() if known[0] is not request}
        self.answers.admitted.add(handle=handle, request_id=request.submit.request_id)
        for choice in range(request.submit.n):
            self.open[handle + choice] = (request, choice)

    async def step(self) -> session_pb2.SessionResponse:
        scheduler = self.scheduler
        while scheduler.silent:
            await asyncio.sleep(0.05)
        if scheduler.paused.is_set() and self.open:
            await asyncio.sleep(scheduler.step_s)
        elif not self.wake.is_set():
            try:
                async with asyncio.timeout(0.1):
                    await self.wake.wait()
            except TimeoutError:
                pass
        self.wake.clear()
        response, self.answers = self.answers, session_pb2.SessionResponse()
        if scheduler.room is not None:
            response.room = scheduler.room
        if scheduler.paused.is_set():
            self._emit(response)
        return response

    def _emit(self, response: session_pb2.SessionResponse) -> None:
        handles: list[int] = []
        indexes: list[int] = []
        tokens: list[int] = []
        for handle, (request, choice) in list(self.open.items()):
            output, start = request.outputs[choice], request.sent[choice]
            end = min(start + self.scheduler.tokens_per_step, len(output))
            params = request.submit.params
            if start == 0 and params.HasField("prompt_logprobs"):
                ids = unpack_i32(request.submit.prompt_token_ids).tolist()
                entries = [fake_logprobs(i, params.prompt_logprobs) for i in ids[1:]]
                response.logprobs.add(handle=handle, first_index=1, tokens=entries, prompt=True)
            handles += [handle] * (end - start)
            indexes += range(start, end)
            tokens += output[start:end]
            if params.HasField("logprobs"):
                entries = [fake_logprobs(i, params.logprobs) for i in output[start:end]]
                response.logprobs.add(handle=handle, first_index=start, tokens=entries)
            request.sent[choice] = max(end, start)
            if end >= len(output):
                del self.open[handle]
                response.finished.append(self._finished(handle, request, choice))
        response.token_handles = pack_u32(handles)
        if self.scheduler.malformed:
            self.scheduler.malformed = False
            response.token_handles += b"\0"
        response.token_indexes = pack_u32(indexes)
        response.token_ids = pack_i32(tokens)

    def _finished(self, handle: int, request: Request, choice: int) -> session_pb2.Finished:
        output, params = request.outputs[choice], request.submit.params
        finished = session_pb2.Finished(handle=handle, num_output_tokens=len(output), num_cached_tokens=16)
        finished.reason = sampling_pb2.FINISH_REASON_LENGTH
        if request.submit.pooling:
            finished.reason = sampling_pb2.FINISH_REASON_STOP
            finished.embedding = np.array(self.scheduler.embed(request.submit), "<f4").tobytes()
        if self.scheduler.ends_with is not None:
            finished.reason = sampling_pb2.FINISH_REASON_ERROR
            finished.error.CopyFrom(self.scheduler.ends_with.to_pb())
        if output and output[-1] in (*self.scheduler.welcome.model.eos_token_ids, *params.stop_token_ids):
            finished.reason = sampling_pb2.FINISH_REASON_STOP
            if output[-1] in params.stop_token_ids:
                finished.stop_token_id = output[-1]
        return finished


def fake_logprobs(token_id: int, count: int) -> sampling_pb2.TokenLogprobs:
    """The token itself most likely, at −0.5, then ids above it."""
    tops = range(token_id, token_id + count)
    values = [-0.5 - i for i in range(count)]
    return sampling_pb2.TokenLogprobs(
        token_id=token_id, logprob=-0.5, rank=1, top_token_ids=tops, top_logprobs=values
    )
