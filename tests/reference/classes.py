"""Writes classes.json: what Transformers' configuration classes have for keys that `config.json` leaves out, by `model_type`.

`python classes.py` where transformers is installed. The names are those of Delft's registry, which this reads from its source; keys are
spelled as most classes spell them. The test of `crates/models/src/unsaid.rs` compares Delft's own table with it.
"""
import json
import re
from pathlib import Path

import transformers

# A key, and further names that classes have for it.
KEYS = {
    "hidden_size": ["n_embd"], "intermediate_size": ["ffn_dim", "moe_intermediate_size"], "num_hidden_layers": ["n_layer", "num_layers"],
    "num_attention_heads": ["n_head", "num_heads"], "num_key_value_heads": [], "sliding_window": [], "max_position_embeddings": ["n_positions"],
    "vocab_size": [], "head_dim": [], "global_head_dim": [], "query_pre_attn_scalar": [], "num_experts": ["num_local_experts"],
    "num_local_experts": [], "n_routed_experts": [], "moe_num_experts": [], "num_experts_per_tok": ["num_experts_per_token", "moe_k", "moe_topk"],
    "moe_topk": [], "moe_intermediate_size": [], "shared_expert_intermediate_size": [], "shared_intermediate_size": [],
    "n_shared_experts": ["num_shared_experts", "moe_num_shared_experts"], "first_k_dense_replace": ["num_dense_layers"], "num_dense_layers": [],
    "n_group": ["num_expert_group"], "topk_group": [], "kv_lora_rank": [], "q_lora_rank": [], "qk_nope_head_dim": [], "qk_rope_head_dim": [],
    "v_head_dim": [], "layer_group_size": [], "intermediate_size_mlp": [], "conv_L_cache": [], "linear_conv_kernel_dim": [],
    "linear_key_head_dim": [], "linear_num_key_heads": [], "linear_num_value_heads": [], "linear_value_head_dim": [],
    "mamba_d_conv": ["conv_kernel"], "mamba_d_state": ["ssm_state_size", "state_size"], "mamba_n_heads": ["mamba_num_heads", "num_heads"],
    "mamba_d_head": ["mamba_head_dim", "head_dim"], "mamba_n_groups": ["n_groups"], "hidden_size_per_layer_input": [], "num_kv_shared_layers": [],
    "altup_num_inputs": [], "laurel_rank": [], "index_topk": [], "original_max_position_embeddings": [], "index_head_dim": [], "index_n_heads": [], "attn_layer_offset": [], "attn_layer_period": [], "expert_layer_offset": [], "expert_layer_period": [],
}
EPS = ["rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon"]


def values(config):
    stated, found = config.to_dict(), {}

    def get(name):
        return stated.get(config.attribute_map.get(name, name))

    for key, others in KEYS.items():
        named = [get(name) for name in (key, *others)]
        value = next((value for value in named if value is not None), None)
        if not value:  # one that another setting turns off, as Qwen's window
            value = getattr(type(config), key, value)
        if isinstance(value, list):  # one for each layer, or for text and images
            value = value[0]
        if isinstance(value, int):
            found[key] = value
    if "first_k_dense_replace" not in found and stated.get("mlp_layer_types"):
        found["first_k_dense_replace"] = [*stated["mlp_layer_types"], "sparse"].index("sparse")
    found["eps"] = next((eps for eps in map(get, EPS) if eps is not None), None)
    rotation = stated.get("rope_parameters") or {}
    return {key: value for key, value in {**found, "rope_parameters": rotation}.items() if value is not None}


def main():
    here = Path(__file__).parent
    sources = sorted((here.parents[1] / "crates/models/src").rglob("*.rs"))
    names = {name for source in sources for name in re.findall(r'^\s+name: "([^"]+)"', source.read_text(), re.M)}
    classes = {}
    for name in sorted(names):
        try:
            config = transformers.AutoConfig.for_model(name)
        except (KeyError, ValueError):
            continue  # a family whose class comes with its folders
        listening = getattr(config, "thinker_config", config)  # of models that speak, too
        classes[name] = values(getattr(listening, "text_config", listening))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in classes.items())
    (here / "classes.json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
