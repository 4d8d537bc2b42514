//! Every kernel family, for the `tile` command and the devices.

use tile::case::Spec;

/// All families, in the order of the modules' names.
pub fn all() -> Vec<Spec> {
    [
        crate::add::KERNELS,
        crate::add_norm::KERNELS,
        crate::argmax::KERNELS,
        crate::attention::KERNELS,
        crate::embed::KERNELS,
        crate::gate_up::KERNELS,
        crate::gelu::KERNELS,
        crate::gelu_mul::KERNELS,
        crate::kv_write::KERNELS,
        crate::layer_norm::KERNELS,
        crate::linear::KERNELS,
        crate::linear::gemm::KERNELS,
        crate::linear_add::KERNELS,
        crate::moe::KERNELS,
        crate::mul::KERNELS,
        crate::project::KERNELS,
        crate::rms_norm::KERNELS,
        crate::rope::KERNELS,
        crate::rope_write::KERNELS,
        crate::sample::kernels::KERNELS,
        crate::scale::KERNELS,
        crate::select::KERNELS,
        crate::silu::KERNELS,
        crate::silu_mul::KERNELS,
        crate::softmax::KERNELS,
        crate::top_k::KERNELS,
    ]
    .concat()
}
