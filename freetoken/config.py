"""The one configuration model: every option with its unit, its default and its limits.

freetoken/options.py fills it from flags, environment and file. Rooms take the values they need,
not this object. No field reads anything by itself: `Config()` is the defaults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)


def _split(value: object) -> object:
    """`a,b` from a flag or the environment is a list, as in TOML."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


Name = Annotated[str, StringConstraints(min_length=1)]
Secret = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]+$")]
"""Goes into an HTTP header: visible ASCII without blanks."""
UserPath = Annotated[Path, AfterValidator(Path.expanduser)]


class Config(BaseModel):
    """Immutable. A field with `repr=False` is a secret: it is masked wherever values are shown."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # ---- model
    model: Annotated[
        str | None,
        Field(description="directory of a checkpoint or hub name; default: the demo model"),
    ] = None
    served_model_name: Annotated[
        list[Name],
        BeforeValidator(_split),
        Field(description="names clients may use, the first is the one answered; default: its own"),
    ] = []
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Field(description="where the model runs; auto: on a GPU if torch can use one"),
    ] = "auto"
    compile: Annotated[
        Literal["auto", "off"],
        Field(description="auto: compiled layers and CUDA graphs on a GPU; off: neither"),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32", "float16"],
        Field(description="of weights and KV cache; auto: the checkpoint's"),
    ] = "auto"

    # ---- HTTP
    host: Annotated[Name, Field(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="TCP port; 0: any free one")] = 1919
    api_key: Annotated[
        Secret | None, Field(repr=False, description="secret that clients send as bearer token")
    ] = None

    # ---- capacity: each is a hard constraint of the memory plan
    context_tokens: Annotated[
        int | None,
        Field(
            ge=2,
            description="tokens that one request may use (prompt + output); where more fit, more",
        ),
    ] = None
    num_tokens: Annotated[
        int | None, Field(ge=1, description="KV pool in tokens, a multiple of the page size")
    ] = None
    num_pages: Annotated[
        int | None, Field(ge=1, description="KV pool in pages; excludes --num-tokens")
    ] = None
    kv_reserve_tokens: Annotated[
        int | None, Field(ge=1, description="the automatic KV pool holds at least this many tokens")
    ] = None
    max_seq_len_override: Annotated[
        int | None, Field(ge=2, description="tokens in the model's window, instead of its config's")
    ] = None
    page_size: Annotated[int, Field(ge=1, le=1024, description="tokens in a KV page")] = 16
    max_rows: Annotated[
        int, Field(ge=1, le=4096, description="requests that run at the same time")
    ] = 32
    max_step_tokens: Annotated[
        int | None,
        Field(
            ge=1,
            description="prompt tokens computed at a time (the chunk of a long prompt); default: "
            "512 on a CPU, 256 to 8192 on a GPU, by its memory",
        ),
    ] = None
    max_queued_requests: Annotated[
        int,
        Field(ge=1, description="waiting requests beyond which new ones get 429 with Retry-After"),
    ] = 1024
    max_queued_tokens: Annotated[
        int,
        Field(
            ge=1,
            description="waiting prompt tokens beyond which new requests get 429 with Retry-After",
        ),
    ] = 4_194_304

    # ---- fairness: a long prompt's pass beside the streams that run
    max_stall_ms: Annotated[
        float,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="milliseconds that running streams stop at most for a long prompt; less: "
            "smoother streams, slower prompts",
        ),
    ] = 250.0
    decode_share: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="share of the time that running streams keep while a long prompt passes",
        ),
    ] = 0.2

    # ---- experts
    experts: Annotated[
        Literal["auto", "in-place", "slots"],
        Field(
            description="in-place: computed from host memory, on a CPU; slots: through the slot "
            "cache; auto: slots on a GPU, in place on a CPU"
        ),
    ] = "auto"
    moe_cache_size: Annotated[
        int | None,
        Field(ge=1, description="expert slots in fast memory, over all layers, at most one each"),
    ] = None
    moe_cache_rate: Annotated[
        float | None, Field(gt=0, le=1, description="expert slots as a share of all experts")
    ] = None
    moe_cache_auto: Annotated[
        bool,
        Field(
            description="as many expert slots as fit beside the KV pool: what happens without "
            "--moe-cache-size and --moe-cache-rate"
        ),
    ] = False
    extend_threshold: Annotated[
        Annotated[int, Field(ge=0)] | Literal["auto"],
        Field(
            description="steps with more extend tokens than this stream whole layers (in the "
            "pauses of such a pass: with more than 64, if that is more); 0: always"
        ),
    ] = "auto"
    disable_moe_prefill_overlap: Annotated[
        bool, Field(description="stream a layer's experts after the layer before, not beside it")
    ] = False

    # ---- processes
    threads: Annotated[
        int | None,
        Field(
            ge=1,
            description="CPU threads of the worker, at most; default: all cores",
        ),
    ] = None
    run_dir: Annotated[
        UserPath | None, Field(description="directory of the sockets; default: a private one")
    ] = None
    stall_timeout_s: Annotated[
        float,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="seconds a step may take before /health/ready says 503; after three times "
            "as long the worker is taken for hung, and killed",
        ),
    ] = 60.0
    worker_restarts: Annotated[
        int,
        Field(
            ge=0,
            le=100,
            description="ft serve: a worker that died or hangs is replaced so many times in 60 "
            "seconds; beyond that the server ends",
        ),
    ] = 0
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"], Field(description="least level logged")
    ] = "INFO"

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        """Refuse what contradicts itself whatever the model is; the worker checks the rest."""
        for problem in self._contradictions():
            raise ValueError(problem)
        return self

    def _contradictions(self) -> list[str]:
        """One sentence each, with the values and the remedy."""
        found = []
        if self.num_tokens is not None and self.num_pages is not None:
            found.append(
                f"--num-tokens {self.num_tokens} and --num-pages {self.num_pages} both set the "
                "size of the KV pool; give one of them"
            )
        if self.num_tokens is not None and self.num_tokens % self.page_size:
            below = self.num_tokens // self.page_size * self.page_size
            lower = f"{below} or " if below else ""
            found.append(
                f"--num-tokens {self.num_tokens} is no multiple of the page size {self.page_size}; "
                f"use {lower}{below + self.page_size}"
            )
        pool = self.pool_tokens
        for flag, tokens in (
            ("--context-tokens", self.context_tokens),
            ("--kv-reserve-tokens", self.kv_reserve_tokens),
        ):
            if pool is not None and tokens is not None and tokens > pool:
                found.append(
                    f"{flag} {tokens} does not fit into the KV pool of {pool} tokens "
                    f"({pool // self.page_size} pages of {self.page_size}); raise the pool or "
                    f"lower {flag}"
                )
        window = self.max_seq_len_override
        if window is not None and self.context_tokens is not None and self.context_tokens > window:
            found.append(
                f"--context-tokens {self.context_tokens} exceeds --max-seq-len-override {window}"
            )
        return found + self._expert_contradictions()

    def _expert_contradictions(self) -> list[str]:
        found = []
        slots = []
        if self.moe_cache_size is not None:
            slots.append(f"--moe-cache-size {self.moe_cache_size}")
        if self.moe_cache_rate is not None:
            slots.append(f"--moe-cache-rate {self.moe_cache_rate}")
        if self.moe_cache_auto:
            slots.append("--moe-cache-auto")
        if len(slots) > 1:
            found.append(
                f"{slots[0]} and {slots[1]} both set the number of expert slots; give one of them"
            )
        if self.experts == "in-place":
            for flag, is_given in (
                ("--moe-cache-size", self.moe_cache_size is not None),
                ("--moe-cache-rate", self.moe_cache_rate is not None),
                ("--moe-cache-auto", self.moe_cache_auto),
                ("--extend-threshold", self.extend_threshold != "auto"),
            ):
                if is_given:
                    found.append(
                        f"{flag} is about expert slots and --experts in-place has none; "
                        "use --experts slots"
                    )
        return found

    @property
    def pool_tokens(self) -> int | None:
        """Size of the KV pool in tokens if the options fix it, else None."""
        if self.num_tokens is not None:
            return self.num_tokens
        return None if self.num_pages is None else self.num_pages * self.page_size
