"""Signals while training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from recsys_offload.stop_request import StopRequest, StopRequested


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_raised_where_it_is_safe(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        stop.raise_if_requested()
        os.kill(os.getpid(), number)
        with pytest.raises(StopRequested):
            stop.raise_if_requested()
    assert signal.getsignal(number) is before


def test_a_second_signal_ends_the_process_at_once() -> None:
    code = """
import os, signal
from recsys_offload.stop_request import StopRequest
with StopRequest():
    os.kill(os.getpid(), signal.SIGINT)
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("too late", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert done.stdout == "still here\n"
    assert "once more ends at once" in done.stderr
