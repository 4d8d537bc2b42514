//! Qwen3.5-MoE (Qwen Team 2026), its text: Qwen3-Next whose projections are stored one by one.

use crate::unsaid::Unsaid;
use crate::{Architecture, experts, hybrid, llama, qwen2_moe, qwen3, qwen3_next};

pub(crate) const ARCHITECTURE: Architecture = Architecture {
    title: "Qwen3.5-MoE, its text",
    name: "qwen3_5_moe",
    gguf: "qwen35moe",
    class: "Qwen3_5MoeForConditionalGeneration",
    unsaid: Unsaid::sizes([2048, 0, 40, 16, 2, 0, 32_768, 248_320])
        .numbers(hybrid::NUMBERS)
        .numbers(&[
            ("moe_intermediate_size", 512),
            ("num_experts", 256),
            ("num_experts_per_tok", 8),
            ("shared_expert_intermediate_size", 512),
        ]),
    names: &[
        hybrid::NAMES,
        llama::NAMES,
        qwen3::NORMS,
        experts::STACKS,
        experts::SWITCHED,
        qwen2_moe::SHARED,
    ],
    signs: None,
    experts: true,
    open: qwen3_next::open,
};
