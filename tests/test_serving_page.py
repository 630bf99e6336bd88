"""The page at `/` in headless Chromium: it shows the model and its load, and sends a message."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from serving_process import serving

CHROMIUM = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
pytest.importorskip("uvicorn")
SECONDS = 240


class Browser:
    """A page of headless Chromium, by its protocol for developers over two pipes: messages of JSON that end with 0."""

    def __init__(self, profile: pathlib.Path):
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        assert CHROMIUM is not None
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
        ]
        command = [CHROMIUM, *flags, f"--user-data-dir={profile}", "about:blank"]
        # Chromium reads messages from descriptor 3 and writes them to 4.
        launch = "import os, sys; [os.dup2(int(sys.argv[at + 1]), at + 3) for at in (0, 1)]; "
        launch += "os.execv(sys.argv[3], sys.argv[3:])"
        ends = [str(to_read), str(to_write)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", launch, *ends, *command], pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._held, self._number, self._session = b"", 0, ""
        self.errors: list[Any] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Runtime.enable")
        self.call("Log.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a method of the protocol. Errors that the page reports meanwhile are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            level = answer.get("params", {}).get("entry", {}).get("level")
            if answer.get("method") == "Runtime.exceptionThrown" or level == "error":
                self.errors.append(answer["params"])

    def _receive(self) -> Any:
        while b"\0" not in self._held:
            found = os.read(self._read, 1 << 16)
            assert found, "Chromium ended"
            self._held += found
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    def value(self, script: str) -> Any:
        """The value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def wait_for(self, script: str) -> Any:
        """The value of an expression, as soon as it is true."""
        end = time.monotonic() + SECONDS
        while not (found := self.value(script)):
            assert time.monotonic() < end, (script, self.value("document.body.innerText"), self.errors)
            time.sleep(0.2)
        return found

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._read)
        os.close(self._write)


@pytest.fixture
def browser(tmp_path: pathlib.Path) -> Iterator[Browser]:
    its = Browser(tmp_path / "profile")
    yield its
    its.close()


def test_the_page_shows_the_model_and_talks(tmp_path: pathlib.Path, browser: Browser) -> None:
    key = "a-key-of-24-characters-x"
    with serving(tmp_path, "qwen3_moe", key=key) as server:  # of its answers all is content
        browser.call("Page.navigate", url=f"{server.url}/")
        browser.wait_for("document.getElementById('state')?.textContent === 'ready'")
        browser.wait_for("!document.getElementById('key').hidden")
        type_key = f"document.getElementById('key').value = '{key}'"
        browser.value(f"{type_key}; document.getElementById('key').dispatchEvent(new Event('change')); 0")
        assert browser.wait_for("model") == "qwen3_moe"
        refused = [error for error in browser.errors if "401" in json.dumps(error)]
        assert browser.errors == refused  # of requests before the key was there
        browser.value("document.getElementById('text').value = 'Why <b>is</b> it?'; 0")
        for _ in range(5):  # random weights may end an answer before it has begun
            browser.value("document.getElementById('form').requestSubmit(); 0")
            browser.wait_for("running === null")
            if browser.value("messages.length") == 2:
                break
            assert browser.value("document.querySelectorAll('.message.error').length") > 0
        assert browser.value("messages.length") == 2
        assert (
            browser.value("[...document.querySelectorAll('.message.user div:last-child')].at(-1).textContent")
            == "Why <b>is</b> it?"
        )
        assert browser.value("document.querySelectorAll('.message.assistant').length") == 1
        browser.wait_for("!document.getElementById('experts').hidden")
        assert browser.value("document.getElementById('load').width") == 4
        assert "tokens/s" in browser.value("document.getElementById('numbers').textContent")
        assert browser.errors == refused
