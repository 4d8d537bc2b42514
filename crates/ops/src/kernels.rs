//! Every kernel family, for the `tile` command and the devices.

use tile::case::{Case, Spec};

/// All families, in the order of the modules' names.
pub fn all() -> Vec<Spec> {
    [
        crate::add_norm::KERNELS,
        crate::argmax::KERNELS,
        crate::attention::KERNELS,
        crate::block_linear::KERNELS,
        crate::delta_net::KERNELS,
        crate::embed::KERNELS,
        crate::gate_up::KERNELS,
        crate::gated::KERNELS,
        crate::gated_norm::KERNELS,
        crate::gaussian_top_k::KERNELS,
        crate::gradient::adamw::KERNELS,
        crate::gradient::attend::cases::KERNELS,
        crate::gradient::conv::KERNELS,
        crate::gradient::cross_entropy::KERNELS,
        crate::gradient::delta::cases::KERNELS,
        crate::gradient::dropout::KERNELS,
        crate::gradient::elements::KERNELS,
        crate::gradient::embedding_noise::KERNELS,
        crate::gradient::experts::cases::KERNELS,
        crate::gradient::gains::KERNELS,
        crate::gradient::gated_norm::KERNELS,
        crate::gradient::gaussian_top_k::KERNELS,
        crate::gradient::limits::KERNELS,
        crate::gradient::match_rms::KERNELS,
        crate::gradient::matmul::KERNELS,
        crate::gradient::mix::KERNELS,
        crate::gradient::norms::KERNELS,
        crate::gradient::products::KERNELS,
        crate::gradient::rows::KERNELS,
        crate::gradient::scan::cases::KERNELS,
        crate::gradient::scan::by_element::cases::KERNELS,
        crate::gradient::xielu::KERNELS,
        crate::group_limit::KERNELS,
        crate::indexer::kernels::KERNELS,
        crate::join_columns::KERNELS,
        crate::joined::KERNELS,
        crate::kv_write::KERNELS,
        crate::layer_norm::KERNELS,
        crate::linear::KERNELS,
        crate::linear::gemm::KERNELS,
        crate::linear::stream::KERNELS,
        crate::linear::stream::LAID,
        crate::linear_add::KERNELS,
        crate::low_rank::kernels::KERNELS,
        crate::low_rank::pairs::KERNELS,
        crate::map::KERNELS,
        crate::match_rms::KERNELS,
        crate::mix::KERNELS,
        crate::moe::KERNELS,
        crate::norm_add::KERNELS,
        crate::project::KERNELS,
        crate::rms_norm::KERNELS,
        crate::rope::KERNELS,
        crate::rope_write::KERNELS,
        crate::round_rows::KERNELS,
        crate::sample::kernels::KERNELS,
        crate::scale::KERNELS,
        crate::scale_columns::KERNELS,
        crate::scale_rows::KERNELS,
        crate::select::KERNELS,
        crate::selective_scan::KERNELS,
        crate::short_conv::KERNELS,
        crate::softmax::KERNELS,
        crate::splice::KERNELS,
        crate::stretch::KERNELS,
        crate::top_k::KERNELS,
        crate::xielu::KERNELS,
        crate::zip::KERNELS,
    ]
    .concat()
}

/// Those cases of all families whose schedules only Apple's GPUs have: matrix-vector products in
/// many small groups ([`crate::tuned::SmallGroups`]).
pub fn only_apple() -> Vec<Case> {
    crate::linear::cases::small_groups()
}
