"""Lets vLLM inspect a model class in its own process: a new one imports vLLM again, 7 s for each architecture."""

from vllm.model_executor.models import registry

registry._run_in_subprocess = lambda inspect: inspect()
