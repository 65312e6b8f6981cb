"""Makes the pictures of README, into docs/pictures/: the demo's chart, and the dashboard of a server at work.

Usage: pictures.py [demo | dashboard]   (the dashboard needs chromium)
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtide.engines.transformers import attach
from kvtide_lab.bench.services import free_ports
from wheel import ROOT, run

PICTURES = ROOT / "docs" / "pictures"
WORK_S = 60.0
BROWSER = (
    "chromium",
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
)
MADE = ("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--window-size=1280,840")


def demo() -> None:
    """Run the demo in a home of its own and keep its chart."""
    with tempfile.TemporaryDirectory() as name:
        command = ("env", f"XDG_CACHE_HOME={name}", sys.executable, "-m", "kvtide.cli", "demo", "--json")
        shutil.copy(json.loads(run(*command, cwd=ROOT))["plot"], PICTURES / "demo.png")


def work(url: str) -> None:
    """Ask about a dozen long texts again and again, each time with another question, by a small model."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).eval()
    model.generation_config.pad_token_id = 0
    texts = torch.randint(1, 256, (12, 1600))
    stop_s = time.monotonic() + WORK_S
    while time.monotonic() < stop_s:
        # An engine that is restarted has nothing in its own memory.
        with attach(model, url) as cached:
            for text in texts[torch.randperm(len(texts))[:4]]:
                question = torch.randint(1, 256, (300,))
                cached.generate(torch.cat([text, question])[None], max_new_tokens=4)
            cached.flush(10)


def dashboard() -> None:
    """Let a server work for a minute and take its dashboard's picture."""
    with tempfile.TemporaryDirectory() as name:
        (port,) = free_ports(1)
        tiers = ("--tier", "memory://", "--tier", f"disk://{name}/store")
        command = (sys.executable, "-m", "kvtide.cli", "serve", "--listen", f"127.0.0.1:{port}", *tiers)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            server.stdout.readline()
            url = f"http://127.0.0.1:{port}"
            try:
                work(url)
                made = (
                    f"--user-data-dir={name}/browser",
                    f"--screenshot={PICTURES / 'dashboard.png'}",
                    "--timeout=8000",
                )
                run(*BROWSER, *MADE, *made, url, cwd=ROOT)
            finally:
                server.terminate()


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    wanted = sys.argv[1:] or ["demo", "dashboard"]
    for each in wanted:
        {"demo": demo, "dashboard": dashboard}[each]()
