"""Names of request fields by what becomes of them. README.md of the gateway lists them for users."""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


COMMON = _names(
    """model n stream stream_options stop seed temperature top_p top_k min_p repetition_penalty presence_penalty
    frequency_penalty max_tokens min_tokens stop_token_ids ignore_eos include_stop_str_in_output skip_special_tokens
    logit_bias allowed_token_ids bad_token_ids bad_words cache_salt priority request_id truncate_prompt_tokens logprobs
    prompt_logprobs return_token_ids return_tokens_as_token_ids add_special_tokens best_of response_format echo"""
)
CHAT = _names(
    """messages max_completion_tokens top_logprobs add_generation_prompt continue_final_message chat_template_kwargs
    tool_choice modalities reasoning_effort"""
)
# Kvern knows what they ask for and can't do it: only null, false and empty values pass.
REFUSED = _names(
    """audio chat_template documents early_stopping function_call functions guided_choice guided_decoding_backend
    guided_grammar guided_json guided_regex guided_whitespace_pattern images kv_transfer_params logits_processors
    logprob_token_ids prediction prompt_embeds reasoning repetition_detection structured_outputs suffix
    thinking_token_budget tools use_beam_search vllm_xargs web_search_options"""
)
# They change nothing that Kvern does, and clients send them by habit.
IGNORED = _names(
    """user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention parallel_tool_calls
    spaces_between_special_tokens include_reasoning length_penalty mm_processor_kwargs media_io_kwargs verbosity"""
)
