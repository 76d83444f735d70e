"""What the scheduler re-checks of a submission, so that no gateway can hurt it or a worker."""

from __future__ import annotations

from kvern.block_hash import HASH_BYTES
from kvern.errors import KvernError, invalid
from kvern.media import MAX_MEDIA_BYTES
from kvern.v1 import error_pb2, model_pb2
from kvern_scheduler.core.batch import MAX_STOP_IDS
from kvern_scheduler.core.requests import MAX_CHOICES, Submission

MAX_LOGPROBS = 20
MAX_ID_LENGTH = 256


def check_submission(submission: Submission, model: model_pb2.ModelInfo, block_size: int) -> None:
    """Raises KvernError where a field is outside what the model can serve."""
    prompt, params = submission.prompt, submission.params
    if submission.model and submission.model != model.name:
        raise KvernError(
            error_pb2.ERROR_CODE_MODEL_NOT_FOUND,
            "this cell serves another model",
            field="model",
            value=submission.model,
            limit=model.name,
        )
    if submission.pooling != model.HasField("pooling"):
        served, asked = ("embeddings", "generation") if not submission.pooling else ("tokens", "embeddings")
        raise KvernError(
            error_pb2.ERROR_CODE_UNIMPLEMENTED,
            f"model {model.name} gives {served}; {asked} cannot be asked of it",
            field="model",
            value=model.name,
        )
    if not submission.request_id or len(submission.request_id) > MAX_ID_LENGTH:
        raise invalid(
            "request_id",
            f"request_id has 1 to {MAX_ID_LENGTH} characters",
            value=len(submission.request_id),
            limit=MAX_ID_LENGTH,
        )
    if not prompt.size:
        raise invalid("prompt", "the prompt is empty; it needs at least one token", value=0, limit=1)
    lowest, highest = int(prompt.min()), int(prompt.max())
    if lowest < 0 or highest >= model.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise invalid(
            "prompt_token_ids",
            f"token id {wrong} is outside the vocabulary of {model.vocab_size}",
            value=wrong,
            limit=model.vocab_size - 1,
        )
    if submission.media:
        _check_media(submission, model)
    if submission.pooling and submission.n != 1:
        raise invalid("n", f"n is {submission.n}; an embedding is one", value=submission.n, limit=1)
    if not 1 <= submission.n <= MAX_CHOICES:
        raise invalid("n", f"n is {submission.n}; 1 to {MAX_CHOICES}", value=submission.n, limit=MAX_CHOICES)
    if not params.HasField("max_tokens"):
        params.max_tokens = max(1, model.max_model_len - prompt.size)
    if submission.pooling:
        params.max_tokens = 0
    elif params.max_tokens < 1:
        raise invalid("max_tokens", "max_tokens is 0; at least 1", value=0, limit=1)
    if params.min_tokens > params.max_tokens:
        raise invalid(
            "min_tokens",
            f"min_tokens {params.min_tokens} is above max_tokens {params.max_tokens}",
            value=params.min_tokens,
            limit=params.max_tokens,
        )
    if prompt.size + params.max_tokens > model.max_model_len:
        raise KvernError(
            error_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
            f"{prompt.size} prompt tokens and max_tokens {params.max_tokens} exceed the context of "
            f"{model.max_model_len}; shorten the prompt or lower max_tokens",
            field="max_tokens",
            value=prompt.size + params.max_tokens,
            limit=model.max_model_len,
        )
    if len(params.stop_token_ids) > MAX_STOP_IDS:
        raise invalid(
            "stop_token_ids",
            f"{len(params.stop_token_ids)} stop token ids; at most {MAX_STOP_IDS}",
            value=len(params.stop_token_ids),
            limit=MAX_STOP_IDS,
        )
    if any(token >= model.vocab_size for token in params.stop_token_ids):
        raise invalid(
            "stop_token_ids",
            "a stop token id is outside the vocabulary",
            value=max(params.stop_token_ids),
            limit=model.vocab_size - 1,
        )
    for field in ("logprobs", "prompt_logprobs"):
        if params.HasField(field) and getattr(params, field) > MAX_LOGPROBS:
            raise invalid(
                field,
                f"{field} is {getattr(params, field)}; at most {MAX_LOGPROBS}",
                value=getattr(params, field),
                limit=MAX_LOGPROBS,
            )
    if len(submission.hashes) > prompt.size // block_size:
        raise invalid(
            "block_hashes",
            f"{len(submission.hashes)} block hashes for {prompt.size} tokens in blocks of {block_size}",
            value=len(submission.hashes),
            limit=prompt.size // block_size,
        )


def _check_media(submission: Submission, model: model_pb2.ModelInfo) -> None:
    if not model.images:
        raise KvernError(
            error_pb2.ERROR_CODE_UNIMPLEMENTED,
            f"model {model.name} takes no images",
            field="media",
            value=model.name,
        )
    total, end = sum(len(item.pixels) for item in submission.media), 0
    if total > MAX_MEDIA_BYTES:
        raise invalid(
            "media",
            f"the images have {total} bytes of pixels; a request may have {MAX_MEDIA_BYTES}: send fewer, or let them be "
            "made smaller",
            value=total,
            limit=MAX_MEDIA_BYTES,
        )
    for item in submission.media:
        if len(item.hash) != HASH_BYTES or item.offset < end or item.length == 0:
            raise invalid("media", "images overlap, are empty, or have no hash", value=item.offset)
        end = item.offset + item.length
    if end > submission.prompt.size:
        raise invalid("media", "an image lies behind the prompt", value=end, limit=submission.prompt.size)


def check_capacity(submission: Submission, capacity: int) -> None:
    """Raises CONTEXT_LENGTH_EXCEEDED where the request could not run even alone."""
    needed = submission.prompt.size + submission.params.max_tokens
    if needed > capacity:
        raise KvernError(
            error_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
            f"the request may need {needed} tokens of KV memory, and the pool holds {capacity}; "
            "shorten the prompt or lower max_tokens, or give the worker more KV memory",
            field="max_tokens",
            value=needed,
            limit=capacity,
        )


def check_whole(submission: Submission, model: model_pb2.ModelInfo, max_step_tokens: int) -> None:
    """Raises CONTEXT_LENGTH_EXCEEDED where a prompt that cannot be cut into chunks exceeds a step."""
    if model.pooling.bidirectional and submission.prompt.size > max_step_tokens:
        raise KvernError(
            error_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
            f"the input has {submission.prompt.size} tokens, and an encoder computes them in one step of at most "
            f"{max_step_tokens}; shorten it, or raise --max-num-batched-tokens",
            field="input",
            value=submission.prompt.size,
            limit=max_step_tokens,
        )
