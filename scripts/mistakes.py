"""Make the mistakes that users make, and list what is printed, the exit status and the processor seconds.

    python scripts/mistakes.py                    a table in Markdown
    python scripts/mistakes.py --json FILE        also the whole output of each command
    python scripts/mistakes.py --only yaml flag   only cases whose group is named

Each case is one command in a new process. The cases without torch are also tests (tests/scripts/test_mistakes.py).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

RUN = "--task causal_lm --lr 1e-3 --epochs 1 --device cpu --data-dir data --no-save"
SCRATCH = f"{RUN} --model-type gpt2 --tokenizer-path words"
SMALL = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 16"
LABELS = "--task sequence_classification --lr 1e-3 --epochs 1 --device cpu --no-save --model-type bert"
TRAINED = f"{LABELS} {SMALL} --tokenizer-path words"
PREDICT = "predict run --output out.jsonl"


@dataclass(frozen=True)
class Case:
    """A command with a mistake.

    Attributes:
        group: the kind of mistake.
        command: words after ``rapidformer``, or a script with its arguments.
        expected: a part of the output.
        status: the exit status.
        needs_torch: whether the mistake can be found only with torch.
    """

    group: str
    command: str
    expected: str
    status: int = 2
    needs_torch: bool = False


CASES = (
    # Flags and values.
    Case("flag", f"{SCRATCH} --micro-batch-sise 3", "did you mean --micro-batch-size?"),
    Case("flag", f"{SCRATCH} --foo 1 --bar 2 --micro-batch-size three", "unknown flag --bar"),
    Case("flag", f"{SCRATCH} --lrr 1 --data-dir nowhere", "the folder nowhere does not exist"),
    Case("flag", f"{SCRATCH} --epochs", "argument --epochs: expected one argument"),
    Case("flag", f"{SCRATCH} my words", "unexpected argument 'my', and 1 more"),
    Case("flag", f"{SCRATCH} --epochs 0 --lr -1", "--lr must be at least 0"),
    Case("flag", f"{SCRATCH} --clip-grad inf", "must be a finite number"),
    Case("flag", f"{SCRATCH} --device gpu", "did you mean cuda?"),
    Case("flag", "job.yaml", "did you mean rapidformer --config job.yaml?"),
    Case("flag", "train.py", "did you mean rapidformer --user-script train.py?"),
    Case("flag", "doctr", "did you mean doctor?"),
    Case("flag", "--user-script none.py", "the script none.py does not exist"),
    Case("flag", "--user-script plain.py --micro-batch-sise 3", "did you mean --micro-batch-size?"),
    # Flags of other programs.
    Case("peers", f"{SCRATCH} --cutoff_len 8", "did you mean --seq-length?"),
    Case("peers", f"{SCRATCH} --sequence_len 8", "did you mean --seq-length?"),
    Case("peers", f"{SCRATCH} --finetuning_type lora", "did you mean --lora-rank 8?"),
    Case("peers", f"{SCRATCH} --sample_packing true", "did you mean --pack-sequences?"),
    Case("peers", f"{SCRATCH} --beta 0.1", "did you mean --preference-beta?"),
    Case("peers", f"{SCRATCH} --gradient_accumulation_steps 4", "did you mean --global-batch-size?"),
    # YAML and JSON files.
    Case("yaml", "--config three.yaml", "unknown key 'bf17'"),
    Case("yaml", "--config twice.yaml", "the key 'lr' is there twice"),
    Case("yaml", "--config tab.yaml", "indent with spaces, not with tabs"),
    Case("yaml", "--config list.yaml", "must map flags to values"),
    Case("yaml", "--config none.yaml", "the configuration file none.yaml does not exist"),
    Case("yaml", "--config code.yaml", "a file cannot set user_script"),
    Case("yaml", f"{SCRATCH} --deepspeed-config twice.json", "has stage twice"),
    # Folders, models and data.
    Case("files", SCRATCH.replace("--no-save", ""), "--save DIR"),
    Case("files", SCRATCH.replace("--no-save", "--save run"), "already holds a run"),
    Case("files", SCRATCH.replace("--no-save", "--save run --resume --overwrite"), "--overwrite deletes"),
    Case("files", f"{RUN} --tokenizer-path words", "no model is named"),
    Case("files", f"{RUN} --pretrained-model-name-or-path ./nowhere", "nowhere"),
    Case("files", f"{RUN} --pretrained-model-name-or-path data", "there is no config.json in data"),
    Case("files", f"{RUN} --pretrained-model-name-or-path half", "there are no weights in half"),
    Case("files", f"{RUN} --model-type gpt2", "no tokenizer is named"),
    Case("files", f"{SCRATCH} --load nowhere", "the folder nowhere does not exist"),
    Case("files", f"{SCRATCH} --data-name tweets", "there is no data set 'tweets' in data"),
    Case("files", f"{SCRATCH} --text-column words", "there is no column 'words'"),
    Case("files", "--task pretraining --model-type gpt2 --lr 1 --train-iters 1 --no-save", "no corpus is named"),
    # Rules and values that fit no plan.
    Case("rules", f"{SCRATCH} --zero-3-memory-optimization --fsdp-memory-optimization", "error[RF"),
    Case("rules", f"{SCRATCH} --mask-prob 0.2 --split 9,1", "does not use --split"),
    Case("rules", f"{SCRATCH} --metric-for-best blue --metric-for-best-mode min", "has no metric 'blue'"),
    Case("rules", f"plan {SCRATCH} --validation-fraction 5", "--validation-fraction must be at most 1"),
    Case("rules", f"plan {SCRATCH} --lora-rank 2 --lora-alpha -1", "--lora-alpha must be at least 0"),
    # After the training.
    Case("after", "evaluate nowhere", "nowhere does not exist"),
    Case("after", "evaluate stopped", "holds no exported model"),
    Case("after", "evaluate run --data-dir nowhere --data-name x", "the folder nowhere does not exist"),
    Case("after", "predict nowhere --input data/train.csv --output out.jsonl", "nowhere does not exist"),
    Case("after", "predict run", "--output is missing"),
    Case("after", f"{PREDICT} --input nowhere.csv", "nowhere.csv does not exist"),
    Case("after", f"{PREDICT} --input odd.csv", "none of the columns is called text"),
    Case("after", f"{PREDICT} --input data/train.csv --temperature -1", "--temperature must be at least 0"),
    Case("after", f"{PREDICT} --input data/train.csv --max-new-tokens 0", "--max-new-tokens must be at least 1"),
    Case("after", f"{PREDICT} --input data/train.csv --micro-batch-size 0", "--micro-batch-size must be at least 1"),
    Case("after", "chat run --temperature inf", "must be a finite number"),
    Case("after", "export nowhere", "nowhere does not exist"),
    Case("after", "doctor --build cpu_adm", "did you mean cpu_adam?"),
    # Bad rows of data.
    Case("data", f"{TRAINED} --data-dir bad", "bad/train.csv:3", needs_torch=True),
    # The memory of the machine.
    Case("memory", f"{SCRATCH} --num-layers 1 --hidden-size 20000000000000 --num-attention-heads 2",
         "while the model is built", status=1, needs_torch=True),
    # Hooks of a script.
    Case("hooks", "hooks.py --break detached", "does not depend on the trained parameters", needs_torch=True),
    Case("hooks", "hooks.py --break token", "the token id 299", needs_torch=True),
    Case("hooks", "hooks.py --break label", "the label 7", needs_torch=True),
    Case("hooks", "hooks.py --brake token", "did you mean --break?", needs_torch=True),
)  # fmt: skip

HOOKS = '''
from dataclasses import dataclass

import torch
from transformers import BertConfig, BertForSequenceClassification

from rapidformer_templates import Data, Trainer, flag


@dataclass(frozen=True)
class Flags:
    """Mine"""

    break_: str = flag("", "what to break", aliases={"break": None})


class Job(Trainer):
    Flags = Flags

    def build_data(self):
        ids = torch.arange(4) + (296 if self.flags.break_ == "token" else 0)
        label = torch.tensor(7 if self.flags.break_ == "label" else 0)
        return Data(train=[{"input_ids": ids + i % 2, "labels": label} for i in range(6)])

    def build_model(self):
        return BertForSequenceClassification(
            BertConfig(vocab_size=20 if self.flags.break_ == "token" else 300, hidden_size=8, num_hidden_layers=1,
                       num_attention_heads=1, intermediate_size=8, num_labels=3)
        )

    def compute_loss(self, model, batch):
        loss = model(**batch).loss
        return loss.detach() if self.flags.break_ == "detached" else loss


Job.main(lr=0.1, epochs=1, no_save=True, device="cpu")
'''


PLAIN = """
from rapidformer_templates import Finetuner


class Job(Finetuner):
    pass


if __name__ == "__main__":
    Job.main(lr=0.1)
"""


def prepare(folder: Path) -> None:
    """Write the files that the cases name."""
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "a": 4, "b": 5}
    tokenizer = {
        "version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None, "decoder": None,
        "truncation": None, "padding": None, "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
    }  # fmt: skip
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[SEP]", "cls_token": "[CLS]"}
    bert = {"architectures": ["BertForSequenceClassification"], "model_type": "bert"}
    texts = {
        "words/tokenizer.json": json.dumps(tokenizer),
        "words/tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}),
        "data/train.csv": "text,label\n" + "a b,x\nb a,y\n" * 5,
        "bad/train.csv": "text,label\na b,x\n,y\nb,\n" + "a b,x\nb a,y\n" * 5,
        "odd.csv": "words\na b\n",
        "three.yaml": "micro_batch_sise: 3\nlearning_rate: 1e-3\nbf17: true\n",
        "twice.yaml": "lr: 1e-3\ntask: causal_lm\nlr: 1e-4\n",
        "tab.yaml": "task: causal_lm\n\tlr: 1e-3\n",
        "list.yaml": "- lr\n- task\n",
        "code.yaml": "user_script: train.py\n",
        "job.yaml": "task: causal_lm\n",
        "twice.json": '{"zero_optimization": {\n"stage": 2,\n"stage": 3}}',
        "half/config.json": json.dumps(bert),
        "run/plan.json": '{"values": {}}',
        "run/export/config.json": json.dumps(bert),
        "run/export/model.safetensors": "",
        "stopped/plan.json": '{"values": {}}',
        "hooks.py": HOOKS,
        "plain.py": PLAIN,
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Outcome:
    """The result of a case.

    Attributes:
        output: standard error, and standard output before it.
        processor: processor seconds of the process and its children.
        wall: seconds that the user waits.
    """

    status: int
    output: str
    processor: float
    wall: float


def measure(case: Case, folder: Path) -> Outcome:
    """Run a case in a new process."""
    words = shlex.split(case.command)
    program = [sys.executable] if words[0] == "hooks.py" else [sys.executable, "-m", "rapidformer_templates"]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run([*program, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Outcome(done.returncode, done.stdout + done.stderr, processor, time.perf_counter() - began)


def as_row(case: Case, outcome: Outcome, lines: int = 3) -> str:
    """Return the row of a case in the table."""
    shown = [line for line in outcome.output.splitlines() if line.strip()]
    first = next((i for i, line in enumerate(shown) if line.startswith("error")), 0)
    text = "<br>".join(line.replace("|", "\\|") for line in shown[first : first + lines])
    command = case.command.replace("|", "\\|").replace(SCRATCH, "…").replace(TRAINED, "…").replace(RUN, "…")
    return f"| {case.group} | `{command}` | {text} | {outcome.status} | {outcome.processor:.2f} |"


def problems_of(case: Case, outcome: Outcome) -> list[str]:
    """Return what is wrong with the outcome of a case."""
    problems = []
    if outcome.status != case.status:
        problems.append(f"the status is {outcome.status}, not {case.status}")
    if case.expected not in outcome.output:
        problems.append(f"the output lacks '{case.expected}'")
    if "Traceback" in outcome.output:
        problems.append("there is a stack trace")
    return problems


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes to a file")
    parser.add_argument("--only", nargs="+", default=(), metavar="GROUP", help="groups of cases")
    options = parser.parse_args(argv)
    results, failed = [], 0
    print("| group | command | output | status | processor s |\n|---|---|---|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        for case in CASES:
            if options.only and case.group not in options.only:
                continue
            outcome = measure(case, Path(name))
            print(as_row(case, outcome), flush=True)
            problems = problems_of(case, outcome)
            failed += bool(problems)
            results.append({**asdict(case), **asdict(outcome), "problems": problems})
            print(*(f"{problem}: {case.command}\n" for problem in problems), sep="", end="", file=sys.stderr)
    slowest = max((result["processor"] for result in results if not result["needs_torch"]), default=0)
    print(f"\n{len(results)} mistakes. Without torch: at most {slowest:.2f} processor seconds.")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
