"""Pictures of the web page, in docs/pictures: a service on an empty database, one plan, a browser.

    python benchmarks/pictures.py [FOLDER]

Needs Chromium, and the extras `server` and `dev` (Pillow comes with matplotlib).
"""

import sys
import tempfile
from contextlib import closing
from io import BytesIO
from pathlib import Path

import httpx
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.served import served  # noqa: E402
from tests.stand_ins.browser import Browser  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
JOB = {
    "model": "llama3-70b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 64},
    "training": {"seq_len": 8192, "global_batch_size": 256},
}
PIPELINE = {**JOB, "search": {"fix": {"pp": 8}, "top_k": 5}}
COLOURS = 64  # a page has few; a third of the bytes
DRAWN = "[...document.querySelectorAll('.chart')].every(c => c.querySelector('svg, canvas'))"


def main(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as name,
        served(f"sqlite:///{name}/x.db", Path(name)) as site,
    ):
        url = site.url
        plans = [
            httpx.post(f"{url}/plan", json=job, timeout=300.0).json()["id"]
            for job in (JOB, PIPELINE)
        ]
        with closing(Browser()) as started, started as browser:
            for file, plan, (width, height), dark, place in (
                ("plan.png", plans[0], (1440, 1500), False, "header"),
                ("plan-dark-390.png", plans[0], (390, 1200), True, "figure"),
                ("pipeline.png", plans[1], (1440, 1150), False, ".pair"),
            ):
                browser.look(width=width, height=height, dark=dark)
                browser.open(f"{url}/#/plan/{plan}")
                browser.wait("document.querySelector('#ranked')")
                if plan == plans[1]:
                    browser.wait("document.querySelector('#timeline svg, #timeline canvas')")
                browser.wait(DRAWN)
                browser.value(f"document.querySelector('{place}').scrollIntoView()")
                with Image.open(BytesIO(browser.picture(whole=False))) as shot:
                    few = shot.convert("P", palette=Image.Palette.ADAPTIVE, colors=COLOURS)
                    few.save(target / file, optimize=True)
                sys.stdout.write(f"{target / file}: {(target / file).stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
