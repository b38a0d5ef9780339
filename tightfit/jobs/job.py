"""Job: what the user wants, as one frozen, validated object.

A field's docstring is its documentation in `tightfit train --fields` and in docs/jobs.md.
A field that is unknown, out of range or in conflict with another is an error here, before anything is read or written.
Nothing in this module imports torch: a job can be checked and planned on a laptop.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tightfit.jobs.adapter import AdapterTraining
from tightfit.jobs.distill import Distill
from tightfit.jobs.experts import ExpertTraining
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.precision import Precision as Precision
from tightfit.jobs.precision import PrecisionName as PrecisionName
from tightfit.jobs.quantize import Quantize
from tightfit.jobs.rules.refusals import refused_by_deepspeed, refused_by_trainer
from tightfit.jobs.rules.rule import Run
from tightfit.jobs.section import Place, Section
from tightfit.models.spec import ModelSpec

EngineName = Literal["tightfit", "deepspeed"]


class ModelChoice(Section):
    source: str
    """A preset (`tightfit models` lists them), a Hugging Face directory, `hf:org/name`, a run, or a GGUF file."""
    weights: Literal["auto", "random", "pretrained"] = "auto"
    """`pretrained` needs a source with weights; `auto` takes them where there are some, else starts at random."""
    shape: dict[str, int] = Field(default_factory=dict)
    """Sizes to change on a randomly initialised model, by ModelSpec name: `layers`, `hidden_size`, `mlp_size`, …"""

    @model_validator(mode="after")
    def _shape_needs_random(self) -> Self:
        if self.shape and self.weights == "pretrained":
            raise ValueError("shape changes the sizes, so pretrained weights cannot be loaded; drop one of the two")
        return self


VOCAB_MULTIPLE = 64
"""Vocabularies of new models are rounded up to a multiple of this, which keeps the output GEMM aligned on every GPU."""


def rounded_vocabulary(tokens: int) -> int:
    """The vocabulary size of a new model for a tokenizer of `tokens` tokens."""
    return -(-tokens // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


class TokenizerChoice(Section):
    source: str = "model"
    """`model` takes the model's own, `train` makes a byte-level BPE of the data; else a directory, run or GGUF file."""
    vocab_size: int = Field(default=8192, ge=260, le=1_000_000)
    """Vocabulary of a trained tokenizer."""
    train_bytes: int = Field(default=16_000_000, ge=1)
    """How much of the data a trained tokenizer looks at."""


def _listed(value: object) -> object:
    """`train: PATH` is short for `train: [PATH]`."""
    return [value] if isinstance(value, str) else value


class Data(Section):
    train: Annotated[list[str], BeforeValidator(_listed)] = Field(min_length=1)
    """Files (text, .jsonl, .json, .csv, .parquet; .gz and .zst), patterns, folders, saved datasets, `stdlib`."""
    weights: list[Annotated[float, Field(gt=0)]] | None = None
    """Relative number of rows taken from each entry of `train`; without, every entry counts by its size."""
    held_out: float | list[str] = 0.01
    """Share of documents held out for evaluation, or the files to evaluate on; 0 for none."""
    field: str = "text"
    """Column or key that holds the text (pre-training)."""
    sequence_length: int = Field(default=1024, ge=2)
    """Tokens per training row."""
    separate_documents: bool = True
    """Keep attention and positions inside each packed document."""
    pack: bool = True
    """Pack several conversations into one row (fine-tuning)."""
    cache: Place = Path("~/.cache/tightfit")
    """Where tokenized shards are kept between runs."""

    @model_validator(mode="after")
    def _weight_each(self) -> Self:
        if self.weights is not None and len(self.weights) != len(self.train):
            raise ValueError(
                f"data.weights has {len(self.weights)} numbers for {len(self.train)} data.train; give one each"
            )
        return self

    @model_validator(mode="after")
    def _held_out_in_range(self) -> Self:
        if isinstance(self.held_out, float) and not 0 <= self.held_out <= 0.5:
            raise ValueError(f"held_out is {self.held_out}; give a share from 0 to 0.5, or a list of files")
        return self


class Optimizer(Section):
    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled decay of matrices; norms, biases and positions are never decayed."""
    l1: float = Field(default=0.0, ge=0)
    """Decoupled L1 of matrices, for pruning: each step moves a weight by lr × l1 towards zero, not past it."""
    keep_zeros: bool = False
    """Zero the gradient of matrix weights that are exactly zero, so that pruned weights stay pruned."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 switches clipping off."""

    @model_validator(mode="after")
    def _betas_in_range(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}; both must be at least 0 and below 1")
        return self


class Schedule(Section):
    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning rate after warm-up; wsd is warm-up, stable, decay."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up from zero."""
    final_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""
    decay_share: float = Field(default=0.2, gt=0, le=1)
    """Share of all steps spent decaying under wsd."""


class Evaluation(Section):
    every: int = Field(default=0, ge=0)
    """Steps between held-out evaluations; 0 for start and end only."""
    max_rows: int = Field(default=64, ge=1)
    """Rows of held-out data used each time."""
    prompts: list[str] = Field(default_factory=list)
    """Prompts continued at the end of the run."""
    sample_tokens: int = Field(default=120, ge=1)
    """Tokens generated for each prompt."""
    temperature: float = Field(default=0.7, ge=0)
    """Sampling temperature of those continuations; 0 is greedy."""
    stop_early: int = Field(default=0, ge=0)
    """End the run after so many evaluations in a row without a lower held-out loss; 0 for never."""


class Saving(Section):
    every: int = Field(default=100, ge=0)
    """Steps between checkpoints; 0 for the end only."""
    keep: int = Field(default=2, ge=1)
    """How many of the latest checkpoints stay."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest held-out loss; evaluate as often as you save."""
    sharded: bool | None = None
    """`true`: each rank writes its own shard while training goes on, and `tightfit export` makes one model of them;
    `false`: the first rank gathers everything in its host's memory and writes it. `null` is true for several ranks."""


class Logging(Section):
    every: int = Field(default=1, ge=1)
    """Steps between rows of metrics.jsonl."""
    tensorboard: bool = False
    """Also write TensorBoard events."""
    wandb: bool = False
    """Also log to Weights & Biases, where it is installed; `WANDB_MODE=offline` for later."""
    mlflow: bool = False
    """Also log to MLflow, where it is installed: to `MLFLOW_TRACKING_URI`, or a file in the run's directory."""
    project: str = Field(default="tightfit", min_length=1)
    """The project (Weights & Biases) or experiment (MLflow) that the run belongs to."""


def _source_only(value: object) -> object:
    """`model: NAME` is short for `model: {source: NAME}`."""
    return {"source": value} if isinstance(value, str) else value


def _one_or_many(value: object) -> object:
    """`data: PATH` and `data: [PATH, …]` are short for `data: {train: […]}`."""
    return {"train": _listed(value)} if isinstance(value, str | list) else value


class Job(Section):
    """One training run."""

    model: Annotated[ModelChoice, BeforeValidator(_source_only)]
    """What is trained."""
    data: Annotated[Data, BeforeValidator(_one_or_many)]
    """What it is trained on."""
    output: Place
    """Directory of the run: checkpoints, metrics and pictures."""
    objective: Literal["pretrain", "sft"] = "pretrain"
    """Next-token prediction on packed text, or supervised fine-tuning on conversations with loss on answers only."""
    distill: Distill = Distill()
    """Distillation from a teacher besides the data."""
    quantize: Quantize = Quantize()
    """Quantization-aware training: weights are rounded in forward, for a compressed model at the end."""
    adapter: AdapterTraining = AdapterTraining()
    """Low-rank matrices that are trained on top of the frozen model (LoRA, QLoRA)."""
    tokenizer: Annotated[TokenizerChoice, BeforeValidator(_source_only)] = TokenizerChoice()
    """How text becomes tokens."""
    steps: int | None = Field(default=None, ge=1, le=10**12)
    """Optimizer steps; give this or `epochs`."""
    epochs: float | None = Field(default=None, gt=0, le=1e6)
    """Passes over the data; give this or `steps`."""
    global_batch: int = Field(default=8, ge=1)
    """Rows per optimizer step, over all ranks and accumulation steps."""
    precision: Precision = "auto"
    """bf16 and fp16 keep float32 master weights (fp16 scales the loss); pure-bf16 keeps none; auto suits the device."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seeds the weights and the order of the data."""
    optimizer: Optimizer = Optimizer()
    """AdamW."""
    experts: ExpertTraining = ExpertTraining()
    """How the experts of a routed model are trained."""
    schedule: Schedule = Schedule()
    """The learning rate over time."""
    engine: EngineName = "tightfit"
    """What shards and updates the weights: tightfit (on torch's DDP and FSDP2), or DeepSpeed's ZeRO-1, 2 or 3."""
    layout: Layout = Layout()
    """How the run is spread over ranks; more than one needs torchrun."""
    levers: Levers = Levers()
    """Settings that lower memory, usually for time; `auto` is short for `fit: true`."""
    fit: bool = False
    """Choose the levers and the micro-batch that fit this machine and are fastest, except those given."""
    evaluation: Evaluation = Evaluation()
    """Held-out loss and samples."""
    saving: Saving = Saving()
    """Checkpoints."""
    logging: Logging = Logging()
    """Metrics written during the run."""

    @model_validator(mode="before")
    @classmethod
    def _auto_levers(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("levers") == "auto":
            return {**fields, "levers": {}, "fit": True}
        return fields

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.steps is None and self.epochs is None:
            raise ValueError("neither steps nor epochs is given; say how long to train with one of the two")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"steps is {self.steps} and epochs is {self.epochs}; give exactly one of the two")
        self._divide_batch()
        rows = self.layout.micro_batch * self.layout.data
        if self.global_batch % rows:
            raise ValueError(
                f"global_batch {self.global_batch} is not a multiple of layout.micro_batch {self.layout.micro_batch} "
                f"× layout.data {self.layout.data}; change one"
            )
        if self.steps is not None and self.schedule.warmup_steps > self.steps:
            raise ValueError(
                f"schedule.warmup_steps is {self.schedule.warmup_steps}, more than the {self.steps} steps of the run; "
                "lower it, or raise steps"
            )
        self._refuse_unknown_losses()
        if self.tokenizer.source == "train" and self.model.weights == "pretrained":
            raise ValueError("tokenizer.source is train, but pretrained weights need the tokenizer they came with")
        if sentence := self.refusal():
            raise ValueError(sentence)
        return self

    def _refuse_unknown_losses(self) -> None:
        """Refuse settings that compare held-out losses where there are none."""
        asked = [
            *(["evaluation.stop_early"] if self.evaluation.stop_early else []),
            *(["saving.keep_best"] if self.saving.keep_best else []),
        ]
        if asked and not self.data.held_out:
            raise ValueError(f"{asked[0]} compares held-out losses, but data.held_out is 0; hold out some, or drop it")
        if self.evaluation.stop_early and not self.evaluation.every:
            raise ValueError(
                f"evaluation.stop_early is {self.evaluation.stop_early}, but evaluation.every is 0, so that nothing is "
                "evaluated on the way; set evaluation.every"
            )

    def _divide_batch(self) -> None:
        """Set a micro-batch that was not given to the largest up to its default that divides a data rank's rows."""
        rows, default = self.global_batch // self.layout.data, self.layout.micro_batch
        if "micro_batch" in self.layout.model_fields_set or rows % default == 0 or rows == 0:
            return
        divisor = next(size for size in range(default, 0, -1) if rows % size == 0)
        layout = self.layout.model_copy(update={"micro_batch": divisor})
        layout.model_fields_set.discard("micro_batch")  # fitting may still choose another
        object.__setattr__(self, "layout", layout)

    def refusal(self, spec: ModelSpec | None = None) -> str | None:
        """The sentence with which the rules of the engine refuse this job, checked against the model where its shape is
        known; None where they allow it."""
        run = Run(
            layout=self.layout,
            levers=self.levers,
            precision=self.precision,
            accumulation=self.accumulation,
            spec=spec,
            sequence_length=self.data.sequence_length if spec is not None else None,
            distills=self.distill.teacher is not None,
            compares_features=self.distill.features > 0 or self.distill.attention > 0,
            rounding=self.quantize.rounding,
            adapted=self.adapter.adapted(spec=spec),
            shrinks=self.optimizer.l1 > 0,
            keeps_zeros=self.optimizer.keep_zeros,
        )
        return refused_by_deepspeed(run) if self.engine == "deepspeed" else refused_by_trainer(run)

    @property
    def saves_sharded(self) -> bool:
        """Whether each rank writes its own shard of a checkpoint; adapters are small, so the first rank writes them."""
        wanted = self.engine == "tightfit" if self.saving.sharded is None else self.saving.sharded
        return wanted and self.layout.ranks > 1 and self.adapter.rank is None

    @property
    def accumulation(self) -> int:
        """Micro-batches of a data rank per optimizer step."""
        return self.global_batch // (self.layout.micro_batch * self.layout.data)
