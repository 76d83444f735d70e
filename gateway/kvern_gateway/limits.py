"""What a request may ask for. One place, so that every refusal can name its limit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes are counts unless the name says bytes or chars."""

    max_body_bytes: int = 4 * 2**20
    body_timeout_s: float = 30.0
    max_prompts: int = 128
    max_embedding_inputs: int = 2_048
    max_n: int = 128
    # n times the number of prompts.
    max_choices: int = 1_024
    max_logprobs: int = 20
    max_stop_strings: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 64
    max_logit_bias: int = 1_024
    max_bad_words: int = 256
    max_messages: int = 4_096
    max_salt_chars: int = 256
    # Text longer than this many characters per context token isn't tokenized to find out whether it fits. Ordinary
    # text has 3 to 5; the longest tokens (runs of spaces or dashes) have about 100.
    max_chars_per_token: int = 100
    max_detokenize_ids: int = 1_000_000
    # What waits of one stream whose client does not read, beside some 64 KiB on their way; more ends the stream.
    max_unread_bytes: int = 512 * 1024
    # Rendering a chat template: CPU time, and characters of output.
    template_timeout_s: float = 0.9
    max_template_chars: int = 8 * 2**20
