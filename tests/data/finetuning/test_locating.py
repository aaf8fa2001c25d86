"""A data set's own parts and configurations, in folders as on the hub and in the cache of datasets."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import datasets
import pytest
from datasets.packaged_modules.cache.cache import Cache

from rapidformer_templates.data.finetuning.hub_cache import PART_NAMES
from rapidformer_templates.data.finetuning.locating import locate
from rapidformer_templates.data.finetuning.tables import read_dataset, read_part
from rapidformer_templates.errors import DataError
from rapidformer_templates.planning.config import RunConfig
from tests.support.messages import Says
from tests.support.texts import Configure, Load, write_jsonl

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


@pytest.mark.parametrize(
    ("name", "valid"), [("chat.jsonl", "chat-valid"), ("chat-train.jsonl", "chat-valid"), ("train.jsonl", "valid")]
)
def test_the_validation_file_beside_a_named_one_is_read(
    name: str, valid: str, configure: Configure, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / name, rows("train"))
    write_jsonl(tmp_path / f"{valid}.jsonl", rows("validation"))
    write_jsonl(tmp_path / "other-valid.jsonl", rows("test"))
    (tmp_path / f"{valid}.csv").write_text("text\nother", encoding="utf-8")
    config = configure(data_dir=str(tmp_path), data_name=name)
    assert read(config) == expected()
    alone = read_part(config, None)  # as in evaluation
    assert alone.train.table["text"][:] == expected()[0]


def test_a_share_to_hold_out_is_refused_beside_a_validation_part(load: Load, says: Says) -> None:
    load("masked_lm", rows("train"), validation_fraction=0.2).check()
    with says(DataError):
        load("masked_lm", valid=rows("validation"), validation_fraction=0.2).check()


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


def test_configurations_by_name(configure: Configure, tmp_path: Path, says: Says) -> None:
    """Test configurations that a card describes, and folders. Compare with what datasets reads from the same folder."""
    write(tmp_path / "plain", "{part}.jsonl", "plain")
    write(tmp_path / "b", "{part}.jsonl", "other")
    assert read(configure(data_dir=str(tmp_path), data_name="plain")) == expected("plain")
    for card in (None, "---\nconfigs: [\n---\n"):
        if card:
            (tmp_path / "README.md").write_text(card)
        with says(DataError):
            locate(configure(data_dir=str(tmp_path), data_name="other").data)
    (tmp_path / "README.md").write_text(CARD)
    for name in ("other", None):
        assert read(configure(data_dir=str(tmp_path), data_name=name)) == expected("other")
        theirs = datasets.load_dataset(str(tmp_path), name, cache_dir=str(tmp_path / "cache"))
        assert theirs["train"]["text"][:] == expected("other")[0]


@pytest.mark.parametrize("named", ["../secret.jsonl", "data/../../secret.jsonl", "{0}/secret.jsonl"])
def test_a_card_names_nothing_outside_of_its_folder(
    named: str, configure: Configure, tmp_path: Path, says: Says
) -> None:
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    write_jsonl(tmp_path / "secret.jsonl", [{"text": "a"}])
    entry = f"  - split: train\n    path: {named.format(tmp_path)}\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{entry}---\n")
    with says(DataError):
        locate(configure(data_dir=str(folder)).data)


class OfTheHub(datasets.GeneratorBasedBuilder):  # type: ignore[misc]
    """A stand-in for a data set of the hub with configurations."""

    BUILDER_CONFIGS = [datasets.BuilderConfig(name) for name in ("plain", "long", "default")]  # noqa: RUF012

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=datasets.Features({"text": datasets.Value("string")}))

    def _split_generators(self, manager: object) -> list[datasets.SplitGenerator]:
        return [datasets.SplitGenerator(part, gen_kwargs={"part": part}) for part in COUNTS]

    def _generate_examples(self, part: str) -> Iterator[tuple[int, dict[str, str]]]:
        yield from enumerate(rows(part, self.config.name))


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a cache written by datasets, with two configurations of one set, and another set."""
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
    "named", ["data_name=imdb", "data_dir=a/b", "data_name=someone/MyMovies", "data_dir=someone/MyMovies data_name=x"]
)
def test_what_the_cache_does_not_have(configure: Configure, cached: Path, named: str, says: Says) -> None:
    with says(DataError):
        locate(configure(**dict(word.split("=") for word in named.split())).data)


def texts_of(config: RunConfig, part: str | None) -> list[str]:
    texts: list[str] = read_part(config, part).train.table["text"][:]
    return texts


@pytest.mark.parametrize("part", COUNTS)
@pytest.mark.parametrize(("prefix", "other"), [("", ".json"), ("", "-00000-of-00001.jsonl"), ("set-", ".json")])
def test_two_files_for_one_part_are_refused(
    configure: Configure, tmp_path: Path, part: str, prefix: str, other: str, says: Says
) -> None:
    """This holds for every part, if that part is read. One of the files may be a copy of the other."""
    write(tmp_path, prefix + "{part}.jsonl")
    (tmp_path / f"{prefix}{part}{other}").write_text(json.dumps(rows(part)), encoding="utf-8")
    config = configure(data_dir=str(tmp_path), data_name=prefix.strip("-") or None, evaluate_test=True)
    for name in COUNTS.keys() - {part}:
        assert texts_of(config, PART_NAMES[name]) == [row["text"] for row in rows(name)]
    for refused in (partial(read_dataset, config), partial(read_part, config, PART_NAMES[part])):
        with says(DataError):
            refused()


def test_all_shards_in_the_order_of_their_names(configure: Configure, tmp_path: Path, says: Says) -> None:
    for number in (1, 0, 2):
        write_jsonl(tmp_path / f"test-{number:05}-of-00003.jsonl", [{"text": f"{number}"}])
    config = configure(data_dir=str(tmp_path))
    assert texts_of(config, "test") == texts_of(config, None) == ["0", "1", "2"]
    (tmp_path / "test-00001-of-00003.jsonl").unlink()
    with says(DataError):
        texts_of(config, "test")


@pytest.mark.parametrize("kind", ["folders", "card", "saved", "cached"])
def test_two_names_for_one_part_are_refused(
    configure: Configure, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, says: Says
) -> None:
    monkeypatch.setitem(COUNTS, "dev", 4)
    given = {"data_dir": str(tmp_path)}
    if kind == "saved":
        datasets.DatasetDict({part: datasets.Dataset.from_list(rows(part)) for part in COUNTS}).save_to_disk(tmp_path)
    elif kind == "cached":
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
        folder = {"cache_dir": str(tmp_path), "dataset_name": "tweets", "repo_id": "tweets", "hash": "0" * 16}
        OfTheHub(**folder, config_name="default").download_and_prepare()
        given = {"data_name": "tweets"}
    else:
        write(tmp_path, ("{part}" if kind == "folders" else "of-{part}") + "/a.jsonl")
        splits = "".join(f"  - split: {part}\n    path: of-{part}/*\n" for part in COUNTS)
        (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{splits}---\n")
    config = configure(**given)
    assert [len(texts_of(config, part)) for part in ("train", "test")] == [COUNTS["train"], COUNTS["test"]]
    for refused in (partial(read_dataset, config), partial(read_part, config, None)):
        with says(DataError):
            refused()


def test_a_part_that_is_not_there(configure: Configure, tmp_path: Path, says: Says) -> None:
    for part in ("train", "test"):
        write_jsonl(tmp_path / f"{part}.jsonl", rows(part))
    (tmp_path / "README.md").write_bytes(b"---\nname: \xe9\n---\n")  # the card cannot be read
    (tmp_path / "other").mkdir()
    datasets.DatasetDict({"unsupervised": datasets.Dataset.from_list(rows("test"))}).save_to_disk(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    for name in (None, "other"):
        with says(DataError):
            texts_of(configure(data_dir=str(tmp_path), data_name=name), None)
    with says(DataError):
        locate(configure(data_dir=str(tmp_path / "empty")).data)
