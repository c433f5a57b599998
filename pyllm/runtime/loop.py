"""The engine in a thread of its own: requests come in through a queue, a watchdog ends them with an error where the engine hangs."""

from __future__ import annotations

import threading
import time
from collections import deque

import torch

from pyllm.api.checks import told
from pyllm.runtime.engine import Engine
from pyllm.runtime.request import Request
from pyllm.runtime.wake import together


class EngineLoop:
    """watchdog: seconds that one step may take. After that, or after `shutdown`, every request ends and `submit` raises RuntimeError."""

    def __init__(self, engine: Engine, watchdog: float) -> None:
        self.engine = engine
        self.closed: str | None = None  # why nothing is taken any more
        device = engine.device
        self._device = None if device.type != "cuda" else torch.cuda.current_device() if device.index is None else device.index
        self._watchdog, self._step_began = watchdog, 0.0  # 0: no step is running
        self._inbox: deque[tuple[Request, bool]] = deque()  # (request, True: enqueue, False: abort)
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pyllm engine", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch, name="pyllm watchdog", daemon=True).start()

    def submit(self, requests: list[Request]) -> None:
        if self.closed is not None:
            raise RuntimeError(f"LLM: {self.closed}")
        self._inbox.extend((r, True) for r in requests)
        self._wake.set()
        if self.closed is not None:  # closed in between: nobody reads the queue any more
            self._end_all("abort", None)

    def abort(self, request: Request) -> None:
        self._inbox.append((request, False))
        self._wake.set()

    def close(self) -> None:
        """Take nothing more and end soon; does not wait for it."""
        self.closed = self.closed or "it was shut down"
        self._wake.set()

    def shutdown(self) -> None:
        self.close()
        if self._thread is not threading.current_thread() and not self._hangs():
            while self._thread.is_alive() and not self._hangs():
                self._thread.join(0.05)
            if self._thread.is_alive():  # `_watch` has ended with `close`
                self._end_all("error", f"a step took longer than watchdog_timeout={self._watchdog:g} seconds")

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)  # a thread begins on the first one
            self._serve()
        except BaseException as error:
            self.closed = f"the engine's thread ended: {told(error)}"
            self._end_all("error", self.closed)
            raise
        finally:
            self._end_all("abort", None)

    def _serve(self) -> None:
        engine = self.engine
        while self.closed is None:
            self._wake.clear()
            while self._inbox:
                request, new = self._inbox.popleft()
                if new:
                    engine.enqueue(request)
                elif request.request_id >= 0:
                    engine.abort(request)
            if not engine.has_work:
                self._wake.wait()
                continue
            self._step_began = time.monotonic()
            try:
                with together():
                    engine.step()
            except BaseException as error:  # whatever a model raises ends the requests at hand, not the process
                engine.fail(f"a step of the engine failed: {told(error)}")
            self._step_began = 0.0
        engine.hand_out()

    def _hangs(self) -> bool:
        return 0.0 < self._step_began < time.monotonic() - self._watchdog

    def _watch(self) -> None:
        while self.closed is None:
            time.sleep(min(1.0, self._watchdog / 4))
            if self._hangs():
                self.closed = f"a step took longer than watchdog_timeout={self._watchdog:g} seconds"
                self._end_all("error", self.closed)

    def _end_all(self, reason: str, error: str | None) -> None:
        """The engine takes no part in this: it may hang. Its pages are of no more use."""
        waiting = [r for r, new in tuple(self._inbox) if new]
        for request in (*self.engine.running, *self.engine.waiting, *waiting):
            if request.finish_reason is None:
                request.finish_reason, request.error = reason, error
                if request.listener is not None:
                    request.listener(request)
