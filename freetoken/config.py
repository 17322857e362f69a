"""The one configuration model: every option, its unit, its default, and where a value came from.

Sources, strongest first: command-line flags, FREETOKEN_* environment variables, a TOML file, the
defaults here. Rooms take the values they need, not this object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Config(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="FREETOKEN_", extra="forbid", frozen=True)

    # ---- model
    model: Annotated[
        str | None,
        Field(description="directory of a checkpoint or hub name; default: the demo model"),
    ] = None
    served_model_name: Annotated[
        list[str], Field(description="names clients may use; default: the model's own")
    ] = []
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="where the model runs")] = (
        "auto"
    )
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32", "float16"],
        Field(description="of weights and KV cache; auto: the checkpoint's"),
    ] = "auto"

    # ---- HTTP
    host: Annotated[str, Field(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="TCP port; 0: any free one")] = 1919
    api_key: Annotated[str | None, Field(description="clients must send it as a bearer token")] = (
        None
    )

    # ---- capacity: each is a hard constraint of the memory plan
    context_tokens: Annotated[
        int | None, Field(ge=2, description="tokens that one request may use (prompt + output)")
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
        int, Field(ge=1, description="prompt tokens in one step (the chunk of a long prompt)")
    ] = 512
    max_queued_requests: Annotated[
        int, Field(ge=1, description="waiting requests beyond which new ones get 429")
    ] = 1024
    max_queued_tokens: Annotated[
        int, Field(ge=1, description="waiting prompt tokens beyond which new requests get 429")
    ] = 4_194_304

    # ---- experts
    experts: Annotated[
        Literal["auto", "in-place", "slots"],
        Field(description="in-place: computed from host memory; slots: through the slot cache"),
    ] = "auto"
    moe_cache_size: Annotated[
        int | None, Field(ge=1, description="expert slots, over all layers")
    ] = None
    moe_cache_rate: Annotated[
        float | None, Field(gt=0, le=1, description="expert slots as a share of all experts")
    ] = None
    extend_threshold: Annotated[
        int | Literal["auto"],
        Field(description="steps with more extend tokens than this stream whole layers; 0: always"),
    ] = "auto"

    # ---- processes
    threads: Annotated[
        int | None, Field(ge=1, description="CPU threads of the worker; default: all cores")
    ] = None
    run_dir: Annotated[
        Path | None, Field(description="directory of the sockets; default: a private one")
    ] = None
    wire_keys: Annotated[Path | None, Field(description="CURVE key file for tcp endpoints")] = None
    stall_timeout_s: Annotated[
        float, Field(gt=0, description="seconds a step may take before /health/ready says 503")
    ] = 60.0
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"], Field(description="least level logged")
    ] = "INFO"
