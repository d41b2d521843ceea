"""Hugging Face types that need a word of explanation. None is excused from being bit-identical to an ordinary build."""

from __future__ import annotations

from typing import Any

_RESNET = {"backbone_config": {"model_type": "resnet", "out_features": ["stage4"]}}
_STAGES = ["stage2", "stage3", "stage4"]
_PREDICTION = {"prediction_length": 24}
_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "top_k_experts": 2}
_MAMBA = {"hidden_size": 256, "mamba_n_heads": 8, "mamba_d_head": 64, "num_attention_heads": 8}
_HEAD_DIM = {"head_dim": 128}
_SHARED = {"shared_expert_intermediate_size": 64}
_TWO_STAGES = {
    "num_hidden_layers": 2,
    "depths": (1, 1),
    "hidden_sizes": (64, 128),
    "patch_sizes": (16, 6),
}
_DROPOUT = {"dropout_rate": 0.0}

# Changes to the defaults of types whose default configuration no ordinary build accepts (or only with timm), and of
# types that stay large because their fields must agree with each other.
CONFIGS: dict[str, dict[str, Any]] = {
    "autoformer": _PREDICTION,
    "bamba": _MAMBA,
    "chameleon": {"vocabulary_map": {"<image>": 5, "IMGIMGA": 6}},
    "conditional_detr": _RESNET,
    "dab-detr": _RESNET,
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "deformable_detr": {"backbone_config": {"model_type": "resnet", "out_features": _STAGES}},
    "detr": _RESNET,
    "diffusion_gemma": {"text_config": _EXPERTS},
    "diffusion_gemma_text": _EXPERTS,
    "dory": {"num_hidden_layers": 2, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 0},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "gemma4_assistant": {
        "text_config": {
            "hidden_size": 128,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_kv_shared_layers": 2,
            "vocab_size": 1024,
            "vocab_size_per_layer_input": 0,
        }
    },
    "gemma3n_text": {"num_hidden_layers": 6, "num_kv_shared_layers": 0},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": _MAMBA,
    "hunyuan_v1_dense": _HEAD_DIM,
    "hunyuan_v1_moe": _HEAD_DIM,
    "hunyuan_vl": {"text_config": _HEAD_DIM},
    "hunyuan_vl_text": _HEAD_DIM,
    "inkling_mm_model": {"vision_config": {"patch_size": 2}},
    "inkling_vision": {"patch_size": 2},
    "informer": _PREDICTION,
    "kyutai_speech_to_text": {"audio_pad_token_id": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "ministral": _HEAD_DIM,
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "muse_spark": {"audio_config": _TWO_STAGES},
    "muse_spark_audio": _TWO_STAGES,
    "nemotron": {"num_key_value_heads": 8},
    "omdet-turbo": {"backbone_config": {"model_type": "swin", "out_features": _STAGES}},
    "qwen3_omni_moe": {"talker_config": {"spatial_merge_size": 2, "text_config": _SHARED}},
    "qwen3_omni_moe_talker_text": _SHARED,
    "t5gemma2_decoder": _DROPOUT,
    "t5gemma2_encoder": {"text_config": _DROPOUT},
    "t5gemma2_text": _DROPOUT,
    "table-transformer": _RESNET,
    "time_series_transformer": _PREDICTION,
    "zamba": {"num_hidden_layers": 3},
    "zamba2": {
        "num_hidden_layers": 6,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid"],
    },
}

# Where an ordinary build leaves parameters uninitialized, so that nobody can give them its values, and why.
UNINITIALIZED: dict[str, str] = {
    "qwen3_omni_moe": "its talker, see qwen3_omni_moe_talker_text",
    "qwen3_omni_moe_talker_text": "_init_weights knows the experts of the thinker, not those of the talker",
}
