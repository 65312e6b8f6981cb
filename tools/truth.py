"""Puts what docs/truth.toml says into pages, and finds what they claim that it does not say.

Usage: truth.py [--write]   (exit status 1 if a page is out of date or claims something unknown)

A view stands between `<!-- truth: VIEW -->` and `<!-- end -->`. Elsewhere names of models and GPUs, versions of engines
and figures have to be known to the data, and nothing says what is supported or refused.
"""

import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TRUTH = tomllib.loads((ROOT / "docs" / "truth.toml").read_text(encoding="utf-8"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES.remove(ROOT / "docs" / "capabilities.md")
# Formats, and figures with their commits: the numbers there are their own.
REFERENCE = {"format.md", "codec.md", "protocol.md", "benchmarks.md"}
COLUMNS = {"transformers": "transformers", "connector": "`KVTideConnector`", "tier": "`KVTideTier`"}
BAR_COLUMNS = 50
PART = re.compile(r"(<!-- truth: ([\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)

_FAMILIES = (
    "Baichuan Bamba BERT BLOOM ChatGLM Codestral Cohere DeepSeek Devstral Ernie Falcon Gemma GLM GPT gpt-oss Granite "
    "Grok Hunyuan InternLM Jamba Kimi LFM Llama Magistral Mamba MiniMax Mistral Mixtral MPT Nemotron OLMo OPT Phi "
    "Pythia Qwen RWKV SmolLM StableLM StarCoder T5 Whisper Yi Zamba"
)
# With a version, a variant and a size: `Gemma 3 270M`, `Qwen3-MoE`, `Llama-3.1-8B`.
_MODEL = (
    rf"(?:{'|'.join(_FAMILIES.split())})(?![a-z.])"
    r"(?:[ -]?v?\d[\d.]*\d|[ -]?\d)?[a-z]?(?:-[A-Z\d][\w.]*\w|-[A-Z])*(?: \d+[MB])?"
)
_ENGINES = r"vLLM|transformers|SGLang|LMCache|llama-cpp-python|llama\.cpp|Mooncake|Valkey|Redis|Python|torch"
_VERSION = rf"(?:{_ENGINES}) \d+(?:\.\d+)*(?![\w.]* ?[\w%×])"
_STRANGERS = r"Aphrodite|ExLlama\w*|LMDeploy|LM Studio|MLC|MLX|Ollama|TensorRT-LLM|TGI"
_DEVICES = r"[ABHV][1-9]00|GB\d00|A10|A40|L4|L40S?|(?:RTX|GTX) \d+|sm_\d+|MI\d{3}X?|TPUs?|Gaudi|Metal|ROCm|Vulkan"
# What has a name: a model, an engine with its version, an engine that nobody tried, a device.
NAMES = re.compile(rf"\b(?:{_MODEL}|{_VERSION}|{_STRANGERS}|{_DEVICES})(?!\w)")
_NUMBER = r"(?<![\w.–-])((?:\d[\d,]*)?(?:\.\d+)?(?<=\d))"
FIGURE = re.compile(rf"{_NUMBER} ?(×(?! [\d*])|(?<= )times|(?<= )s|ms|[GM]B/s|%)(?![\w/])")
CLAIM = re.compile(r"\b(?:refus(?:e|es|ed)|(?:un)?supported|supports)\b")
_SUBJECTS = "windows?|states?|latents?|MLA|hybrids?|GPUs?|models?|versions of vLLM|parallelism|Sentinel|macOS|fp8"
SUBJECT = re.compile(rf"\b(?:{_MODEL}|{_SUBJECTS})\b")


def served(engine: str) -> list[dict[str, str]]:
    """Return the models that an engine (a column of the data) serves."""
    return [each for each in TRUTH["models"].values() if each.get(engine, "refused") != "refused"]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in [head, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def _support(area: str, *columns: str) -> str:
    heads = {"proven": "proven on", "not_run": "not run on", "refused": "refused at the start, with the reason"}
    refused = [each["name"] for each in TRUTH["models"].values() if each["transformers"] == "refused"]
    words = {"refused": ", ".join(refused), **{engine: len(served(engine)) for engine in COLUMNS}}
    rows = [
        [each["name"], *(each.get(column, "").format(**words) for column in columns)]
        for each in TRUTH["support"]
        if each["area"] == area or (not area and each.get("is_first"))
    ]
    return _table(["", *map(heads.__getitem__, columns)], rows)


def _models() -> str:
    head = ["model", "its layers keep", *COLUMNS.values()]
    rows = [
        [each["name"], each["keeps"], *(each.get(engine, "not tested") for engine in COLUMNS)]
        for each in TRUTH["models"].values()
    ]
    return _table(head, rows)


def _kinds() -> str:
    rows = []
    for kind in TRUTH["kinds"]:
        is_of = re.compile(rf"(?:^|, |and )(?:{kind['words']})\b" if kind["words"] != "rows" else "^rows$")
        names = [each["name"] for each in served("transformers") if is_of.search(each["keeps"])]
        rows.append([kind["name"], ", ".join(names), kind["needs"]])
    return _table(["its layers keep", "tested with", "a hit needs"], rows)


def _measured() -> str:
    said = TRUTH["measured"]
    source = f"{said['what']}. {said['setting']}: `{said['command']}` at {said['commit']}."
    return f"{source}\n\n{_table(['', *said['names']], said['rows'])}"


def _bars() -> str:
    said = TRUTH["measured"]
    place, *cells = said["rows"][0]
    values = [float(cell.removesuffix(" s")) for cell in cells]
    bars = [
        f"{name:<{max(map(len, said['names']))}}  {'█' * max(1, round(BAR_COLUMNS * value / max(values)))} {cell}"
        for name, value, cell in zip(said["names"], values, cells, strict=True)
    ]
    return "\n".join([f"{said['what']}, {place}:\n\n```text", *bars, f"```\n{said['setting']}."])


VIEWS: dict[str, Callable[[], str]] = {
    "models": _models,
    "kinds": _kinds,
    "measured": _measured,
    "bars": _bars,
    "proven": lambda: _support("", "proven", "not_run"),
    "engines": lambda: _support("engine", "proven", "not_run", "refused"),
    "devices": lambda: _support("device", "proven", "not_run", "refused"),
    "stores": lambda: _support("store", "proven", "not_run", "refused"),
}


def renewed(page: Path) -> str:
    """Return a page with its parts as the data says them. KeyError for a view that does not exist."""

    def part(found: re.Match[str]) -> str:
        text = VIEWS[found[2]]()
        if page.parent == ROOT:
            text = re.sub(r"\]\((?=[\w/]+\.md)", "](docs/", text)
        return f"{found[1]}{text}\n{found[3]}"

    return PART.sub(part, page.read_text(encoding="utf-8"))


def _known(page: str) -> tuple[set[str], set[str]]:
    """Return the names that pages may use and the numbers with a unit that one page may."""
    names = {*TRUTH["names"]["all"], *TRUTH["names"].get(page, ())}
    for each in [*TRUTH["models"].values(), *TRUTH["support"], *TRUTH["kinds"], TRUTH["measured"]]:
        names |= set(NAMES.findall(" ; ".join(map(str, each.values()))))
    cells = " ; ".join(cell for row in TRUTH["measured"]["rows"] for cell in row)
    figures = " ; ".join([cells, *(each["value"] for each in TRUTH["figures"])])
    return names, {_figure(each) for each in FIGURE.findall(figures)} | {*TRUTH["plain"].get(page, ())}


def _figure(found: tuple[str, str]) -> str:
    return " ".join(found)


def claims(page: str, text: str) -> Iterator[str]:
    """Yield what a page claims outside of its parts, and the data does not know."""
    names, figures = _known(page)
    prose = FENCE.sub("", PART.sub("", text))
    yield from (f"{name!r} is not known" for name in NAMES.findall(prose) if name not in names)
    if page not in REFERENCE:
        said = map(_figure, FIGURE.findall(prose))
        yield from (f"the figure {each!r} is not known" for each in said if each not in figures)
    for sentence in re.split(r"(?<=[.!?])\s|\||\n\n|\n- ", prose):
        if page not in REFERENCE and CLAIM.search(sentence) and SUBJECT.search(sentence):
            yield f"says itself what is supported or refused: {' '.join(sentence.split())}"


def main() -> int:
    """Renew pages, or say which are old; say what is claimed and unknown. Return the exit status."""
    found = []
    for page in PAGES:
        text = renewed(page)
        if text != page.read_text(encoding="utf-8"):
            if "--write" in sys.argv[1:]:
                page.write_text(text, encoding="utf-8")
            else:
                found.append(f"{page.name}: renew it: python tools/truth.py --write")
        found += [f"{page.name}: {claim}" for claim in claims(page.name, text)]
    print("\n".join(found) or f"{len(PAGES)} pages say what docs/truth.toml says")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
