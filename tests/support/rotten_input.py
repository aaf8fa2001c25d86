"""Damaged and hostile files: edits of valid ones, and a check that reading them ends as a user should see it."""

import json
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from rapidformer_templates.errors import RapidformerError
from rapidformer_templates.run.out_of_memory import explained_without_plan

SECONDS = 20
"""Longest time that a reader may need for one file. It waits for nothing, so a busy machine needs far less."""

MEMORY = 3 << 30
"""Bytes of address space that a reader may take."""

HALF_CHARACTER = "\ud800"

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 2**31, 2**32, 2**63, 2**64, 10**20, 10**400, 0.0, -0.5, 1e-320, 1e308,
    float("inf"), float("nan"), "", "2", "true", "auto", "\0", HALF_CHARACTER, "日本", "x" * 5000, "../../x",
    "/dev/zero", "1e400", [], [[]], [None], [1, "2"], {}, {"a": []}, {"": None}, {HALF_CHARACTER: 1},
    {"a.b": {"a.b": 1}},
)  # fmt: skip
"""JSON values that readers do not expect."""

TEXTS = (
    b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\x80", b"\xed\xa0\x80", b'"\\ud800"', b"\r", b"\n", b"\t", b'"', b",", b"{",
    b"[", b"}", b"]", b":", b"-", b"NaN", b"1e999", b"9" * 5000, b"[" * 2000, b'{"a":' * 2000, b"&a [*a]",
    b"!!python/name:os.x", b"x: [&a [1,1,1,1,1,1,1,1,1], &b [*a,*a,*a,*a,*a,*a,*a,*a], &c [*b,*b,*b,*b,*b,*b,*b,*b]]",
    b"2020-99-99", b"<<: 1", b"? ", b"0x", b"1:60:60", b"---", b"%s", b"/*", b"//", b"#", b"\xe2\x80\xa8",
)  # fmt: skip
"""Bytes that mean something in a format, or nothing in any."""


def edited_bytes(random: Random, content: bytes) -> bytes:
    """Return the bytes after one to four edits: flipped, deleted, repeated, cut off, or foreign ones inserted."""
    edited = bytearray(content)
    for _ in range(random.randint(1, 4)):
        start = random.randint(0, len(edited))
        stop = min(len(edited), start + random.choice((1, 4, 8, 64)))
        match random.choice(("flip", "set", "delete", "repeat", "cut", "insert", "insert")):
            case "flip" if start < len(edited):
                edited[start] ^= 1 << random.randrange(8)
            case "set" if start < len(edited):
                edited[start:stop] = bytes([random.choice((0, 0x7F, 0xFF))]) * (stop - start)
            case "delete":
                del edited[start:stop]
            case "repeat":
                edited[start:start] = edited[start:stop] * random.choice((1, 2, 50))
            case "cut":
                del edited[start:]
            case _:
                edited[start:start] = random.choice(TEXTS)
    return bytes(edited)


def edited_json(random: Random, value: Any) -> bytes:
    """Return the JSON of a value in which one to three places have another value, are missing or are one too many."""
    root = [deepcopy(value)]
    for _ in range(random.randint(1, 3)):
        holder, key = random.choice(list(_places(root)))
        new = deepcopy(random.choice(VALUES))
        match random.choice(("replace", "replace", "replace", "remove", "wrap", "add")):
            case "remove" if holder is not root:
                del holder[key]
            case "wrap":
                holder[key] = random.choice(([holder[key]], {"a": holder[key]}, str(holder[key])))
            case "add" if isinstance(holder, dict):
                holder[random.choice((HALF_CHARACTER, "", "\0", "x" * 300, f"{key}.{key}", key.upper()))] = new
            case _:
                holder[key] = new
    return json.dumps(root[0]).encode()


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(holder) if isinstance(holder, dict) else range(len(holder))
    for key in keys:
        yield holder, key
        if isinstance(holder[key], dict | list):
            yield from _places(holder[key])


@dataclass(frozen=True)
class Rotten:
    """A reader, and the files that it reads.

    Attributes:
        files: the content of each valid file, by its name in the folder.
        target: the file to damage.
        read: reads the folder.
        costs: how many times slower it is than a fast reader. A longer test divides its number of inputs by this.
    """

    files: Mapping[str, bytes]
    target: str
    read: Callable[[Path], object]
    costs: int = 1

    def edited(self, random: Random) -> bytes:
        """Return the target after some edits."""
        content = self.files[self.target]
        if content[:1] not in (b"{", b"[") or random.random() < 0.3:
            return edited_bytes(random, content)
        lines = content.splitlines(keepends=True) if self.target.endswith(".jsonl") else [content]
        line = random.randrange(len(lines))
        return b"".join([*lines[:line], edited_json(random, json.loads(lines[line])), b"\n", *lines[line + 1 :]])

    def check(self, folder: Path, content: bytes) -> RapidformerError | None:
        """Read a folder with this content of the target, and return the error that a user would see.

        The reader must end within limits of time and memory, raise no other error, and change no files.
        """
        for name, valid in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content if name == self.target else valid)
        before = set(folder.rglob("*"))
        error = None
        with limited():
            try:
                with explained_without_plan("RUN", "use a smaller model"):  # as all commands do
                    self.read(folder)
            except RapidformerError as raised:
                error = raised
                error.render()
        assert set(folder.rglob("*")) == before
        return error


class TookTooLong(BaseException):
    """A reader has not ended in time. It is not an Exception, so that readers cannot catch it."""


@contextmanager
def limited() -> Iterator[None]:
    """Limit the time and the memory of the code in the context."""

    def end(number: int, frame: object) -> None:
        raise TookTooLong

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    previous = signal.signal(signal.SIGALRM, end)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, hard))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


DEEPSPEED_FILE = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0, "fp16": {"enabled": False, "loss_scale": 0}, "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 10, "total_num_steps": 100},
    },
    "zero_optimization": {
        "stage": 3, "reduce_bucket_size": 1_000_000, "stage3_max_live_parameters": 1e6,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/fast"},
        "offload_param": {"device": "nvme", "nvme_path": "/fast"},
    },
    "aio": {"thread_count": 2}, "communication_data_type": "fp32", "steps_per_print": 10, "wandb": {"enabled": False},
    "gradient_predivide_factor": 1.0,
}  # fmt: skip
"""A file whose every value has an effect, or is known to have none."""
