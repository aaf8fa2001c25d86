"""The flags, by topic: fields of frozen dataclasses, from which parsing, help and docs are derived.

The flags of each acceleration switch are in the switch's own file. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rapidformer_templates.planning.flag_values import Epochs, Interval, TrackerNames
from rapidformer_templates.planning.optimizers import defaults_of
from rapidformer_templates.planning.schedules import STYLES
from rapidformer_templates.planning.tasks import TASKS


def flag(
    default: object,
    help: str,
    *,
    bare: str | None = None,
    aliases: Mapping[str, str | None] | None = None,
    metavar: str | None = None,
    choices: tuple[str, ...] = (),
    other: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    choice: str | None = None,
    only_with: tuple[str, object] | None = None,
    in_files: bool = True,
    usual: bool = False,
) -> Any:
    """Declare one flag as a dataclass field.

    Args:
        default: the value if the flag is not given.
        help: one line for ``--help`` and the docs.
        bare: the value if the flag is given without one. None requires a value.
        aliases: other spellings, without the dashes, each with the value that it sets. None if the alias takes a value
            itself.
        metavar: the placeholder for the value in the help.
        choices: the accepted values, if a table lists them. A ``Literal`` lists those of other fields.
        other: what else a script can do, for the error about a value that is not among the choices.
        minimum: lowest accepted value.
        maximum: highest accepted value.
        choice: name of a group of flags that exclude each other. A flag on the command line replaces another of its
            group in a file or a script.
        only_with: another field without which the flag has no effect, and a value to suggest for it.
        in_files: whether a YAML file or the plan of an earlier run may set it. False for flags that run code.
        usual: whether ``--help`` shows it. ``--help-all`` shows every flag.

    Raises:
        TypeError: ``only_with`` is not a pair.
    """
    if only_with is not None and (isinstance(only_with, str) or len(only_with) != 2):
        raise TypeError(f"only_with={only_with!r} is not a pair: give a field and a value to suggest for it")
    metadata: dict[str, object] = {
        "help": help,
        "bare": bare,
        "metavar": metavar,
        "minimum": minimum,
        "maximum": maximum,
    }
    metadata |= {"choice": choice, "only_with": only_with, "aliases": dict(aliases or {})}
    metadata |= {"choices": choices, "other": other, "in_files": in_files, "usual": usual}
    return field(default=default, metadata=metadata)


MOST_BLOCKS = 10_000
"""Maximum number of blocks or experts. No model has more, and building it would not end."""


@dataclass(frozen=True)
class LaunchFlags:
    """Launch"""

    config: str | None = flag(None, "YAML file with flags; the command line wins", metavar="FILE", usual=True)
    template: Literal["Trainer", "Pretrainer", "Finetuner"] | None = flag(
        None, "template of a black-box run (default: chosen from the task and the switches)"
    )
    user_script: str | None = flag(
        None, "white-box script to run with these flags; not in a YAML file", metavar="FILE", in_files=False, usual=True
    )
    nproc_per_node: int | None = flag(
        None, "local workers that the command starts itself", minimum=1, maximum=1024, usual=True
    )
    data_parallel_size: int | None = flag(
        None,
        "expected number of data-parallel workers; computed without the flag as all workers / (tensor × pipeline size)",
        minimum=1,
    )
    master_port: int | None = flag(
        None, "port on which the local workers meet (default: a free one)", minimum=1, maximum=65535
    )
    min_workers: int | None = flag(
        None,
        "lowest number of workers that the run may continue with: --nproc-per-node starts again without a lost worker, "
        "from the last checkpoint, and dropout draws the same masks with any number (default: no restart)",
        minimum=1,
    )
    max_restarts: int = flag(
        3,
        "restarts by --min-workers since the last new checkpoint before the run ends",
        only_with=("min_workers", "1"),
        minimum=0,
    )
    worker_timeout: float = flag(
        600.0,
        "seconds without progress after which a run of several workers ends and names the worker that hangs; three "
        "times as many for first steps and saves, at least 1,800 for the setup; 0 waits as long as torch does",
        metavar="SECONDS",
        minimum=0,
    )
    straggler_factor: float = flag(
        1.5,
        "report a worker that is this many times as slow as the median of its peers over 50 steps, without the time in "
        "which it waits for others; 0 does not compare",
        metavar="FACTOR",
        minimum=0,
    )
    device: str = flag(
        "auto",
        "where to train: auto, cpu, or torch's name of the accelerator: cuda (also for AMD), xpu, mps, npu, … "
        "(default: the accelerator, if there is one)",
        metavar="DEVICE",
        usual=True,
    )


@dataclass(frozen=True)
class ModelFlags:
    """Model"""

    pretrained_model_name_or_path: str | None = flag(
        None, "model to start from: a folder, or a name on the Hugging Face hub", metavar="PATH", usual=True
    )
    revision: str | None = flag(
        None,
        "branch, tag or commit of a model on the hub (default: the main branch)",
        metavar="NAME",
        only_with=("pretrained_model_name_or_path", "NAME"),
    )
    model_type: str | None = flag(None, "architecture to train from scratch: gpt2, bert, llama, t5, …", usual=True)
    num_layers: int | None = flag(None, "number of blocks", minimum=1, maximum=MOST_BLOCKS)
    hidden_size: int | None = flag(None, "width of the model", minimum=1)
    num_attention_heads: int | None = flag(None, "attention heads per block", minimum=1)
    max_position_embeddings: int | None = flag(None, "longest sequence that the model accepts, in tokens", minimum=1)
    seq_length: int | None = flag(
        None,
        "length that samples are truncated to, in tokens (default: the longest that the model accepts)",
        minimum=1,
        usual=True,
    )
    new_head: bool = flag(False, "replace a pretrained model's head with a new one for the labels of the data")
    dropout: float | None = flag(
        None, "dropout rate everywhere in the model (default: the model's own)", minimum=0, maximum=1
    )
    base: str | None = flag(
        None, "folder of the base of adapters (default: the one that the adapters name)", metavar="FOLDER"
    )
    trust_remote_code: bool = flag(False, "run code that comes with a model folder; not in a YAML file", in_files=False)


@dataclass(frozen=True)
class DataFlags:
    """Data"""

    micro_batch_size: int = flag(1, "samples per forward on each data-parallel rank", minimum=1, usual=True)
    global_batch_size: int | None = flag(
        None,
        "samples per optimizer step, over all ranks (default: micro batch × data-parallel size)",
        minimum=1,
        usual=True,
    )
    tokenizer_type: (
        Literal["BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer", "HuggingFaceTokenizer"] | None
    ) = flag(None, "tokenizer (default: the model's own)")
    tokenizer_path: str | None = flag(
        None, "folder or hub name of a HuggingFaceTokenizer (default: the model's)", metavar="PATH"
    )
    vocab_file: str | None = flag(None, "vocabulary of the first three tokenizer types", metavar="FILE")
    merge_file: str | None = flag(None, "merges of a GPT2BPETokenizer", metavar="FILE")
    split: str = flag("969,30,1", "train, valid and test shares of a pretraining corpus", metavar="T,V,T")
    data_impl: Literal["mmap", "lazy", "cached", "infer"] = flag("mmap", "how an indexed corpus is read")
    data_path: tuple[str, ...] | None = flag(
        None, "pretraining corpus: text files, indexed prefixes, or a blend '0.3 A 0.7 B'", metavar="PATH", usual=True
    )
    data_dir: str | None = flag(None, "fine-tuning: folder with the files, or one file", metavar="DIR", usual=True)
    data_name: str | None = flag(
        None,
        "fine-tuning: data set in that folder: a file stem or a saved data set; without --data-dir a name on the hub",
        metavar="NAME",
        usual=True,
    )
    data_config: str | None = flag(
        None, "fine-tuning: configuration of a data set on the hub (default: its own default)", metavar="NAME"
    )
    data_split: str | None = flag(
        None,
        "fine-tuning: splits of a data set on the hub for training, validation and test, such as train_sft,test_sft "
        "(default: found by their usual names)",
        metavar="T,V,T",
    )
    text_column: str | None = flag(
        None, "column with the text (default: the task's usual names)", metavar="NAME", usual=True
    )
    pair_column: str | None = flag(None, "column with a second text or the question", metavar="NAME")
    label_column: str | None = flag(
        None, "column with the label, the tags, the answers or the target", metavar="NAME", usual=True
    )
    tools_column: str | None = flag(
        None, "column with the tools that a conversation may call (default: tools or functions)", metavar="NAME"
    )
    problem_type: Literal["regression", "single_label_classification", "multi_label_classification"] | None = flag(
        None, "sequence_classification: kind of labels (default: regression for fractions, multi-label for lists)"
    )
    validation_fraction: float = flag(
        0.1, "share held out for validation if the data has no validation part", minimum=0, maximum=1
    )
    max_train_samples: int | None = flag(None, "use the first N training samples", metavar="N", minimum=1)
    max_eval_samples: int | None = flag(None, "use the first N validation samples", metavar="N", minimum=1)
    eval_data_name: tuple[str, ...] | None = flag(
        None,
        "fine-tuning: further validation sets, each reported as NAME/metric; SET is written like --data-name",
        metavar="NAME=SET",
    )
    evaluate_test: bool = flag(False, "evaluate the test part once, with the exported weights")
    text_unit: Literal["paragraph", "line", "file"] = flag(
        "paragraph", "pretraining: what counts as a document in a .txt file; blank lines separate paragraphs"
    )
    skip_bad_lines: bool = flag(False, "leave out lines and rows that cannot be used, and count them")
    data_cache_dir: str | None = flag(None, "folder for tokenized corpora (default: the user's cache)", metavar="DIR")
    keep_documents_apart: bool = flag(
        False, "causal pretraining: no token sees another document (default: samples cross document borders)"
    )
    mask_prob: float = flag(0.15, "share of tokens that masked-LM and T5 pretraining hide", minimum=0)
    whole_word_mask: bool = flag(False, "mask the tokens of a word together")
    mean_span_length: float = flag(3.0, "mean length of the spans that T5 pretraining hides, in tokens", minimum=1)
    sentence_pairs: bool = flag(
        False,
        "masked pretraining on sentence pairs, with the second head of bert, albert, … (default: windows of text)",
    )
    short_seq_prob: float = flag(0.1, "share of shorter sequences in masked-LM pretraining", minimum=0, maximum=1)
    loss_on: Literal["answers", "last", "all"] | None = flag(
        None,
        "causal_lm: tokens to learn: the answers of chat and instruction data (their default), only the last answer of "
        "each row, or all tokens (the default of plain text)",
    )
    pack_sequences: bool = flag(
        False,
        "causal_lm: pack several samples into each row of --seq-length tokens, without attention between "
        "them; batch sizes count rows",
    )
    streaming: bool = flag(
        False, "read and tokenize the data while training, so that memory does not grow with it; needs --train-iters"
    )
    shuffle_buffer: int | None = flag(
        None,
        "rows of a stream that are shuffled together; 0 keeps the order of the files (default: 1000)",
        metavar="N",
        minimum=0,
        only_with=("streaming", True),
    )
    group_by_length: bool | None = flag(
        None, "batch samples of similar length (default: in fine-tuning, unless samples are packed)"
    )
    dataloader_num_workers: int | None = flag(
        None, "data loader processes per rank (default: chosen by device and data)", minimum=0
    )
    dataloader_pin_memory: bool | None = flag(None, "load batches into page-locked host memory (default: on a GPU)")

    @property
    def is_named(self) -> bool:
        """Whether any data are named."""
        return any((self.data_dir, self.data_name, self.data_path))


@dataclass(frozen=True)
class TrainingFlags:
    """Training"""

    task: str | None = flag(None, "what to train the model for", choices=tuple(TASKS), usual=True)
    save: str | None = flag(
        None,
        "run folder: checkpoints, metrics, summary, plan, exported model",
        metavar="DIR",
        choice="save",
        usual=True,
    )
    no_save: bool = flag(False, "train without --save and discard the model at the end", choice="save", usual=True)
    overwrite: bool = flag(False, "empty a run folder that already holds a run")
    load: str | None = flag(None, "run folder or checkpoint to start from", metavar="DIR")
    resume: bool = flag(
        False, "continue from the newest complete checkpoint in --save", only_with=("save", "DIR"), usual=True
    )
    weights_only: bool = flag(
        False, "with --load: load only the weights and start everything else from scratch", only_with=("load", "DIR")
    )
    allow_changed_data: bool = flag(
        False, "with --resume or --load: continue although the training samples are not those of the checkpoint"
    )
    lr: float | None = flag(None, "peak learning rate", minimum=0, usual=True)
    lr_decay_style: str = flag(
        "linear",
        "learning rate schedule after warmup; from the fourth on, those of transformers",
        choices=tuple(STYLES),
        other="a script may return any schedule from build_scheduler()",
    )
    min_lr: float = flag(0.0, "learning rate at the end of the decay", minimum=0)
    lr_decay_iters: int | None = flag(None, "steps over which the learning rate decays (default: all)", minimum=1)
    lr_warmup_iters: int | None = flag(None, "warmup steps", minimum=0, choice="warmup")
    lr_warmup_fraction: float | None = flag(
        None, "warmup as a share of the decay steps", minimum=0, maximum=1, choice="warmup"
    )
    lr_warmup_samples: int | None = flag(
        None,
        "warmup in samples, rounded up to whole steps of --global-batch-size",
        metavar="N",
        minimum=0,
        choice="warmup",
    )
    lr_num_cycles: int = flag(1, "cycles of cosine_with_restarts, each from the peak to zero", minimum=1)
    lr_power: float = flag(1.0, "exponent of the polynomial decay", minimum=0)
    lr_wsd_decay_iters: int | None = flag(
        None,
        "steps at the end of warmup_stable_decay in which the rate decays (default: a tenth of all)",
        metavar="N",
        minimum=1,
    )
    lr_wsd_decay_style: Literal["cosine", "linear", "1-sqrt"] = flag(
        "cosine", "shape of the decay of warmup_stable_decay"
    )
    weight_decay: float = flag(0.01, "decoupled weight decay; does not apply to biases and norms", minimum=0)
    adam_beta1: float | None = flag(
        None,
        "decay of Adam's first moment, below 1 "
        f"(default: the optimizer's, {defaults_of(lambda facts: facts.betas and facts.betas[0])})",
        minimum=0,
    )
    adam_beta2: float | None = flag(
        None,
        "decay of Adam's second moment, below 1 "
        f"(default: the optimizer's, {defaults_of(lambda facts: facts.betas and facts.betas[1])})",
        minimum=0,
    )
    adam_epsilon: float | None = flag(
        None,
        "added to the root of Adam's second moment "
        f"(default: the optimizer's, {defaults_of(lambda facts: facts.epsilon)})",
        minimum=0,
    )
    layerwise_lr_decay: float | None = flag(
        None,
        "learning rate of each block as a share of that of the block above it",
        metavar="SHARE",
        minimum=0,
        maximum=1,
    )
    ema_decay: float | None = flag(
        None,
        "keep a moving average: DECAY × average + (1 - DECAY) × new weights; the average is evaluated and exported",
        metavar="DECAY",
        minimum=0,
        maximum=1,
    )
    clip_grad: float = flag(1.0, "maximum global gradient norm; 0 disables clipping", minimum=0)
    label_smoothing: float = flag(
        0.0, "share of each target that is spread over all classes while training", minimum=0, maximum=1
    )
    neftune_alpha: float | None = flag(
        None, "noise on the input embeddings while training (NEFTune; usual: 5 to 15)", minimum=0
    )
    preference_loss: Literal["dpo", "ipo", "orpo", "simpo", "kto"] = flag(
        "dpo", "preference: the loss; kto scores each answer separately, orpo and simpo need no reference model"
    )
    preference_beta: float = flag(
        0.1, "preference: how close the model stays to the reference; for orpo, the weight of the odds", minimum=0
    )
    simpo_gamma: float = flag(0.5, "simpo: target margin of the chosen answer")
    kto_desirable_weight: float = flag(1.0, "kto: weight of good answers", minimum=0)
    kto_undesirable_weight: float = flag(1.0, "kto: weight of bad answers", minimum=0)
    precompute_reference: bool = flag(
        False, "preference: compute the reference's log-probabilities once and store them in the run folder"
    )
    train_iters: int | Epochs | None = flag(
        None,
        "optimizer steps to train; 3epochs counts the steps of three passes over the data, also with accumulation",
        metavar="N",
        minimum=1,
        choice="length",
        usual=True,
    )
    epochs: int | None = flag(
        None, "passes over the training data, without accumulation", metavar="N", minimum=1, choice="length", usual=True
    )
    log_interval: int | None = flag(
        None,
        "steps between lines, both printed and in metrics.jsonl (default: prints about 20 lines per run, and writes at "
        "least 100 if the run has as many steps)",
        metavar="N",
        minimum=1,
    )
    log_layer_grad_norms: bool = flag(
        False,
        "add the gradient norm of each block, and of each module outside of the blocks, to metrics.jsonl: "
        "grad_norm/NAME",
    )
    eval_interval: Interval | None = flag(
        None,
        "interval between evaluations: steps, or with a unit 20000samples, 5e7tokens, 30minutes, 0.5epochs (default: "
        "the end of each epoch in a run that is counted in epochs, else of the run)",
        metavar="EVERY",
        usual=True,
    )
    eval_iters: int | None = flag(None, "global batches per evaluation (default: all samples)", minimum=1)
    save_interval: Interval | None = flag(
        None, "interval between checkpoints, in the same units and with the same default", metavar="EVERY", usual=True
    )
    check_replicas: int | None = flag(
        None,
        "steps between comparisons of the values that several workers have, in addition to those before a save and at "
        "the end; 0 never compares",
        metavar="N",
        minimum=0,
    )
    async_save: bool = flag(False, "save in the background; training waits only for the copy to host memory")
    mirror: str | None = flag(
        None,
        "copy checkpoints and results to object storage (s3://, gs://, abfs://, file:// …) during the training; "
        "--resume takes them from there if --save is empty",
        metavar="URL",
        only_with=("save", "DIR"),
    )
    profile: int | None = flag(
        None,
        "profile N steps after a warm-up (5 without N): writes a trace, a table and the causes of idle time to "
        "--save/profile",
        bare="5",
        metavar="N",
        minimum=1,
    )
    keep_checkpoints: int = flag(2, "number of newest checkpoints to keep (the best one is kept as well)", minimum=1)
    keep_best: bool | None = flag(None, "keep and export the checkpoint with the best metric (default: in fine-tuning)")
    metric_for_best: str | None = flag(
        None, "metric by which the best checkpoint is kept (default: the task's)", metavar="NAME"
    )
    metric_for_best_mode: Literal["min", "max"] | None = flag(
        None,
        "whether a lower or a higher --metric-for-best is better (default: known from its name)",
        only_with=("metric_for_best", "NAME"),
    )
    early_stopping_patience: int | None = flag(
        None, "stop after N evaluations in a row without an improvement of --metric-for-best", metavar="N", minimum=1
    )
    report_to: TrackerNames | None = flag(
        None,
        "trackers that receive the metrics, in addition to metrics.jsonl: tensorboard,wandb,mlflow,trackio",
        metavar="NAMES",
    )
    run_name: str | None = flag(
        None, "name of the run in trackers (default: the folder of --save)", only_with=("report_to", "tensorboard")
    )
    project_name: str | None = flag(
        None,
        "project or experiment in trackers (default: that of their environment, else rapidformer)",
        only_with=("report_to", "tensorboard"),
    )
    export_model: bool = flag(True, "write export/, a folder for from_pretrained, at the end")
    push_to_hub: str | None = flag(
        None,
        "upload export/ with a model card to this repository on the hub, at the end",
        metavar="ORG/NAME",
        only_with=("save", "DIR"),
    )
    seed: int = flag(1234, "seed for weights, data order and dropout", minimum=0, maximum=2**32 - 1)

    @property
    def in_epochs(self) -> tuple[str, ...]:
        """The names of the flags whose values are in epochs."""
        names = ["epochs"] if self.epochs is not None else []
        if isinstance(self.train_iters, Epochs):
            names.append("train_iters")
        intervals = {"eval_interval": self.eval_interval, "save_interval": self.save_interval}
        return (*names, *(name for name, every in intervals.items() if every is not None and every.unit == "epochs"))

    @property
    def fine_tunes(self) -> bool:
        """Whether the task is a fine-tuning task. This decides some defaults, in every template."""
        return self.task not in (None, "pretraining")

    @property
    def keeps_best(self) -> bool:
        """Whether the best checkpoint is kept. A metric for it, or early stopping, implies that."""
        needs_best = self.metric_for_best is not None or self.early_stopping_patience is not None
        return self.fine_tunes or needs_best if self.keep_best is None else self.keep_best


SECTIONS: dict[str, type] = {"launch": LaunchFlags, "model": ModelFlags, "data": DataFlags, "training": TrainingFlags}
