"""What kvern-gateway is told about images."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvern_gateway.media.fetch import MediaRules
from kvern_gateway.media.images import ImageLimits, Images, load_images
from kvern_gateway.text.tokenizer import ModelFilesError, TextModel

# Of a body, where it may hold images: several files of the largest size, in base64, are more than a text needs.
MAX_BODY_BYTES = 32 * 2**20


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("images, of models that take them").add_argument
    add(
        "--limit-mm-per-prompt",
        type=_limit,
        default=ImageLimits().max_images,
        metavar="JSON",
        help=f'how many images a request may have: {{"image": 2}} (default: {ImageLimits().max_images})',
    )
    add(
        "--mm-processor-kwargs",
        type=_object,
        default={},
        metavar="JSON",
        help='instead of what the model\'s image processor says: {"max_pixels": 401408}, size, crop_size, …',
    )
    add(
        "--allowed-media-domains",
        action="extend",
        nargs="+",
        metavar="HOST",
        help="hosts that images may be fetched from (default: all with public addresses; others are never asked)",
    )
    add(
        "--allowed-local-media-path",
        type=Path,
        metavar="DIR",
        help="folder under which file:// URLs may name images (default: none may)",
    )


def from_flags(arguments: argparse.Namespace, text: TextModel) -> Images | None:
    """None where the model takes no images. Raises ModelFilesError."""
    domains = arguments.allowed_media_domains
    rules = MediaRules(
        allowed_domains=None if domains is None else frozenset(domain.lower() for domain in domains),
        local_path=arguments.allowed_local_media_path,
    )
    try:
        return load_images(
            *(arguments.model, text.token_text, text.chat_templates.get("default", "")),
            *(rules, ImageLimits(max_images=arguments.limit_mm_per_prompt), arguments.mm_processor_kwargs),
        )
    except ValueError as error:
        raise ModelFilesError(str(error)) from error


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _limit(text: str) -> int:
    """{"image": 2}, or vLLM's {"image": {"count": 2}}."""
    count: Any = ImageLimits().max_images
    for kind, value in _object(text).items():
        value = value.get("count") if isinstance(value, dict) and set(value) == {"count"} else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise argparse.ArgumentTypeError(f"{kind} must be a number of at least 0")
        if kind == "image":
            count = value
        elif value:
            raise argparse.ArgumentTypeError(f"{kind} is not supported; image is")
    return int(count)
