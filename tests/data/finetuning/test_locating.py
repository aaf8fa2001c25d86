"""A data set's own parts and configurations, in folders as the hub has them and in the cache of datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import pytest
from datasets.packaged_modules.cache.cache import Cache

from rapidformer_templates.data.finetuning.locating import locate
from rapidformer_templates.data.finetuning.tables import read_dataset
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.config import RunConfig
from tests.support.texts import write_jsonl

Configure = Callable[..., RunConfig]
COUNTS = {"train": 7, "validation": 3, "test": 2}


def rows(part: str, config: str = "") -> list[dict[str, str]]:
    return [{"text": f"{config} {part} {i}"} for i in range(COUNTS[part])]


def write(folder: Path, layout: str, config: str = "") -> None:
    for part in COUNTS:
        path = folder / layout.format(part=part)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path, rows(part, config))


def read(config: RunConfig) -> tuple[list[str], list[str] | None]:
    raw = read_dataset(config)
    return raw.train.table["text"][:], raw.valid and raw.valid.table["text"][:]


def expected(config: str = "") -> tuple[list[str], list[str]]:
    train, valid = ([row["text"] for row in rows(part, config)] for part in ("train", "validation"))
    return train, valid


@pytest.mark.parametrize(
    "layout", ["{part}/a.jsonl", "data/{part}-00000-of-00001.jsonl", "set/{part}/a.jsonl", "set/data/{part}.jsonl"]
)
def test_folders_as_the_hub_has_them(configure: Configure, tmp_path: Path, layout: str) -> None:
    write(tmp_path, layout)
    name = "set" if layout.startswith("set") else None
    assert read(configure(data_dir=str(tmp_path), data_name=name)) == expected()
    theirs = datasets.load_dataset(str(tmp_path / (name or "")), cache_dir=str(tmp_path / "cache"))
    assert theirs["train"]["text"][:] == expected()[0]
    assert theirs["validation"]["text"][:] == expected()[1]


@pytest.mark.parametrize("part", ["valid", "validation", "val", "dev", "eval"])
def test_what_a_validation_part_may_be_called(configure: Configure, tmp_path: Path, part: str) -> None:
    write_jsonl(tmp_path / "train.jsonl", rows("train"))
    write_jsonl(tmp_path / f"{part}.jsonl", rows("validation"))
    assert read(configure(data_dir=str(tmp_path))) == expected()


CARD = """---
license: mit
configs:
- config_name: plain
  data_files:
  - split: train
    path: plain/train*.jsonl
  - split: validation
    path: [plain/validation.jsonl]
- config_name: other
  default: true
  data_files:
  - split: train
    path: b/train.jsonl
  - split: validation
    path: b/validation.jsonl
---
# A data set
"""


def test_configurations_by_name(configure: Configure, tmp_path: Path) -> None:
    """Those that a card describes, and folders; beside what datasets reads of the same folder."""
    write(tmp_path / "plain", "{part}.jsonl", "plain")
    write(tmp_path / "b", "{part}.jsonl", "other")
    assert read(configure(data_dir=str(tmp_path), data_name="plain")) == expected("plain")
    with pytest.raises(DataError, match="there is no data set 'other'"):
        locate(configure(data_dir=str(tmp_path), data_name="other").data)
    (tmp_path / "README.md").write_text(CARD)
    for name in ("other", None):
        assert read(configure(data_dir=str(tmp_path), data_name=name)) == expected("other")
        theirs = datasets.load_dataset(str(tmp_path), name, cache_dir=str(tmp_path / "cache"))
        assert theirs["train"]["text"][:] == expected("other")[0]
    (tmp_path / "README.md").write_text("---\nconfigs: [\n---\n")
    with pytest.raises(DataError, match="there is no data set 'other'"):
        locate(configure(data_dir=str(tmp_path), data_name="other").data)


class OfTheHub(datasets.GeneratorBasedBuilder):  # type: ignore[misc]
    """Stands for a data set of the hub with configurations."""

    BUILDER_CONFIGS = [datasets.BuilderConfig(name) for name in ("plain", "long", "default")]  # noqa: RUF012

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=datasets.Features({"text": datasets.Value("string")}))

    def _split_generators(self, manager: object) -> list[datasets.SplitGenerator]:
        return [datasets.SplitGenerator(part, gen_kwargs={"part": part}) for part in COUNTS]

    def _generate_examples(self, part: str) -> Iterator[tuple[int, dict[str, str]]]:
        yield from enumerate(rows(part, self.config.name))


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that datasets has written, of two configurations of one set and of another set."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))
    for repository, config in (("someone/MyMovies", "plain"), ("someone/MyMovies", "long"), ("tweets", "default")):
        name = repository.rpartition("/")[2]
        builder = OfTheHub(
            cache_dir=str(cache), dataset_name=name, repo_id=repository, config_name=config, hash="0" * 16
        )
        builder.download_and_prepare()
    return cache


def test_a_set_of_the_hub_in_the_cache(configure: Configure, cached: Path) -> None:
    for config in ("plain", "long"):
        assert read(configure(data_dir="someone/MyMovies", data_name=config)) == expected(config)
        theirs = Cache(
            cache_dir=str(cached), repo_id="someone/MyMovies", dataset_name="MyMovies", config_name=config,
            version="auto", hash="auto",
        ).as_dataset()  # fmt: skip
        assert theirs["train"]["text"][:] == expected(config)[0]
    assert read(configure(data_name="tweets")) == expected("default")


@pytest.mark.parametrize(
    ("flags", "message", "hint"),
    [
        ({"data_name": "imdb"}, "no folder imdb, and no data set of that name in", "nothing is downloaded here"),
        ({"data_dir": "a/b"}, "there is no folder a/b, and no data set", 'load_dataset("a/b")'),
        ({"data_name": "someone/MyMovies"}, "MyMovies has several configurations", "the cache has long, plain"),
        ({"data_dir": "someone/MyMovies", "data_name": "x"}, "no configuration 'x' in the cache", "long, plain"),
    ],
)
def test_what_the_cache_does_not_have(
    configure: Configure, cached: Path, flags: dict[str, str], message: str, hint: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        locate(configure(**flags).data)
    assert hint in str(caught.value.hint)
