"""The recipe's `engine` section: what runs the target for rollouts and stored signals."""

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from draftkv.settings import Section


class Engine(Section):
    """See `draftkv.teacher.engines`."""

    kind: Literal["transformers", "server", "offline"] = Field(
        "transformers", description="in this process; a served vLLM; vLLM in a process of its own environment")
    url: str = Field("http://127.0.0.1:8000", pattern=r"^https?://[^/\s]+(/\S*)?$", description="server: its address")
    model: str | None = Field(None, description="server: the name it serves the target under; null: target.model")
    python: str | None = Field(None, description="of the engine's environment; null: .venv-engine's")
    timeout_s: float = Field(600.0, gt=0, description="wait for one answer (server), one batch or the start (offline)")
    retries: int = Field(6, ge=0, description="more tries after an error or a bad answer, 1, 2, 4 ... 30 s apart")
    concurrency: int = Field(16, ge=1, description="server: most requests in flight")
    options: dict[str, Any] = Field(default_factory=dict, description="vLLM's own, e.g. {tensor_parallel_size: 8}")

    # Options that say where and how fast the target runs; any other may decide a token.
    operational: ClassVar[tuple[str, ...]] = (
        "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "data_parallel_size_local",
        "data_parallel_start_rank", "data_parallel_address", "data_parallel_rpc_port", "data_parallel_backend",
        "enable_expert_parallel", "nnodes", "node_rank", "master_addr", "master_port", "distributed_executor_backend",
        "distributed_timeout_seconds", "device_ids", "numa_bind", "gpu_memory_utilization", "kv_cache_memory_bytes",
        "num_gpu_blocks_override", "cpu_offload_gb", "block_size", "max_num_seqs", "max_num_batched_tokens",
        "max_parallel_loading_workers", "safetensors_load_strategy", "use_tqdm_on_load", "enforce_eager",
        "enable_prefix_caching", "enable_chunked_prefill", "async_scheduling", "disable_custom_all_reduce",
        "disable_hybrid_kv_cache_manager", "download_dir", "trust_remote_code", "disable_log_stats", "seed",
        # of the server alone
        "api_server_count", "log_level", "uvicorn_log_level", "enable_log_requests", "shutdown_timeout",
        "ssl_keyfile", "ssl_certfile", "ssl_ca_certs",
    )  # fmt: skip
    # The recipe says these itself, or the checks of answers rely on them.
    decided: ClassVar[dict[str, str]] = {
        "model": "target.model", "tokenizer": "target.model", "revision": "target.revision",
        "tokenizer_revision": "target.revision", "dtype": "target.dtype and rollouts.dtype",
        "max_model_len": "prompts.max_prompt_tokens and rollouts.max_new_tokens", "max_logprobs": "signal.k",
        "served_model_name": "engine.model", "host": "engine.url", "port": "engine.url",
        "logprobs_mode": "nothing: it is vLLM's default", "generation_config": "nothing: it is always 'vllm'",
        # Manifests would show them.
        "hf_token": "the environment (HF_TOKEN)", "api_key": "the environment (VLLM_API_KEY, DRAFTKV_ENGINE_KEY)",
    }  # fmt: skip

    @field_validator("options")
    @classmethod
    def _undecided(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if "-" in name:
                raise ValueError(f"{name}: write it as {name.replace('-', '_')}")
            if name in cls.decided:
                raise ValueError(f"{name} is set by {cls.decided[name]}; leave it out")
        return value

    @property
    def deciding(self) -> dict[str, Any]:
        """Options that may change what the target answers."""
        return {name: value for name, value in self.options.items() if name not in self.operational}

    @property
    def is_vllm(self) -> bool:
        return self.kind != "transformers"

    @property
    def text(self) -> str:
        """In words, for plans."""
        if not self.is_vllm:
            return "transformers, in the process of the command"
        where = f"a server at {self.url}, {self.concurrency} requests in flight" if self.kind == "server" else "offline"
        return f"vLLM, {where}; {self.retries} retries, {self.timeout_s:g} s for an answer"
