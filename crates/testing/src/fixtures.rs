//! A test for each reference fixture: a failure then names its fixture, and the others are still
//! run, on all cores.

/// Declares a module with a test for each reference fixture, which calls a function with the
/// fixture's path.
///
/// - `fixtures!(name: run)`: every folder with a Hugging Face checkpoint, which `run` takes as
///   `&Path`.
/// - `fixtures!(name: run, twins)`: every GGUF file and quantised folder beside one, which `run`
///   takes as `&Path`.
///
/// A new fixture is a row here; a test of this crate fails if one is missing.
#[macro_export]
macro_rules! fixtures {
    ($name:ident: $run:path) => {
        $crate::fixtures!(@tests $name, $run,
            afmoe "afmoe",
            apertus "apertus",
            arcee "arcee",
            axk1 "axk1",
            baichuan "baichuan",
            bailing_hybrid "bailing_hybrid",
            bamba "bamba",
            bitnet "bitnet",
            bitnet_online "bitnet-online",
            bitnet_plain "bitnet-plain",
            bloom "bloom",
            bloom_long "bloom-long",
            codegen "codegen",
            cohere "cohere",
            cohere2 "cohere2",
            cohere2_moe "cohere2_moe",
            cohere2_moe_rms "cohere2_moe-rms",
            cwm "cwm",
            dbrx "dbrx",
            deepseek2 "deepseek2",
            deepseek2_lite "deepseek2-lite",
            deepseek3 "deepseek3",
            deepseek_v32 "deepseek_v32",
            dots1 "dots1",
            dots1_bias "dots1-bias",
            ernie4_5 "ernie4_5",
            ernie4_5_moe "ernie4_5-moe",
            ernie4_5_vl_moe "ernie4_5_vl_moe",
            exaone "exaone",
            exaone4 "exaone4",
            exaone4_full "exaone4-full",
            exaone_moe "exaone_moe",
            falcon "falcon",
            falcon_h1 "falcon-h1",
            falcon_h1_normed "falcon-h1-normed",
            falcon_mamba "falcon-mamba",
            falcon_new "falcon-new",
            flex_olmo "flex_olmo",
            gemma "gemma",
            gemma2 "gemma2",
            gemma2_scalar "gemma2-scalar",
            gemma3 "gemma3",
            gemma3_vision "gemma3-vision",
            gemma3n "gemma3n",
            gemma4 "gemma4",
            gemma4_moe "gemma4-moe",
            gemma4_small "gemma4-small",
            glm "glm",
            glm4 "glm4",
            glm4_moe "glm4-moe",
            glm4_moe_lite "glm4-moe-lite",
            glm4_moe_one "glm4-moe-one",
            glm4v "glm4v",
            glm4v_moe "glm4v_moe",
            glm_moe_dsa "glm_moe_dsa",
            glm_ocr "glm_ocr",
            gpt2 "gpt2",
            gpt2_scaled "gpt2-scaled",
            gpt_bigcode "gpt-bigcode",
            gpt_neo "gpt-neo",
            gpt_neox "gpt-neox",
            gpt_neox_in_turn "gpt-neox-in-turn",
            gpt_oss "gpt-oss",
            gptj "gptj",
            granite "granite",
            granite4 "granite4",
            granite4_hybrid "granite4-hybrid",
            granite4_hybrid_moe "granite4-hybrid-moe",
            granite4_moe "granite4-moe",
            granite_swa "granite_swa",
            granitemoe "granitemoe",
            granitemoe_swa "granitemoe_swa",
            granitemoeshared "granitemoeshared",
            helium "helium",
            hunyuan "hunyuan",
            hunyuan_alpha "hunyuan-alpha",
            hunyuan_moe "hunyuan-moe",
            hunyuan_vl "hunyuan_vl",
            hy_v3 "hy_v3",
            hyperclovax "hyperclovax",
            internlm2 "internlm2",
            internlm3 "internlm3",
            iquestcoder "iquestcoder",
            jais2 "jais2",
            jamba "jamba",
            jamba_dense "jamba-dense",
            kimi_linear "kimi_linear",
            kimi_linear_heads "kimi_linear-heads",
            laguna "laguna",
            laguna_elements "laguna-elements",
            lfm2 "lfm2",
            lfm2_adjusted "lfm2-adjusted",
            lfm2_moe "lfm2-moe",
            lfm3 "lfm3",
            ling "ling",
            ling2 "ling2",
            llama2 "llama2",
            llama3 "llama3",
            llama3_beyond "llama3-beyond",
            llama4 "llama4",
            llama4_chunks "llama4-chunks",
            llama_192 "llama-192",
            llama_256 "llama-256",
            llama_40 "llama-40",
            llama_96 "llama-96",
            llama_bias "llama-bias",
            llama_dynamic_beyond "llama-dynamic-beyond",
            llama_head_dim "llama-head-dim",
            llama_inferred "llama-inferred",
            llama_linear "llama-linear",
            llama_linear_beyond "llama-linear-beyond",
            llama_long "llama-long",
            llama_prefix "llama-prefix",
            llama_proportional "llama-proportional",
            mamba "mamba",
            mamba2 "mamba2",
            mamba2_authors "mamba2-authors",
            mamba2_biased "mamba2-biased",
            mamba_biased "mamba-biased",
            mellum "mellum",
            mellum_even "mellum-even",
            mimo_v2_flash "mimo_v2_flash",
            minicpm "minicpm",
            minicpm3 "minicpm3",
            minimax_m2 "minimax-m2",
            ministral "ministral",
            ministral3 "ministral3",
            mistral "mistral",
            mistral4 "mistral4",
            mistral4_even "mistral4-even",
            mistral_full "mistral-full",
            mistral_long "mistral-long",
            mixtral "mixtral",
            mixtral_one "mixtral-one",
            moonlight "moonlight",
            mpt "mpt",
            mpt_scaled "mpt-scaled",
            nanochat "nanochat",
            nemotron "nemotron",
            nemotron_h "nemotron-h",
            nemotron_h_moe "nemotron-h-moe",
            nemotron_nas "nemotron-nas",
            nemotron_nas_alone "nemotron-nas-alone",
            olmo "olmo",
            olmo2 "olmo2",
            olmo3 "olmo3",
            olmo_clip "olmo-clip",
            olmo_hybrid "olmo_hybrid",
            olmoe "olmoe",
            opt "opt",
            paddleocr_vl "paddleocr_vl",
            phi "phi",
            phi3 "phi3",
            phi3_short "phi3-short",
            phimoe "phimoe",
            qwen "qwen",
            qwen2 "qwen2",
            qwen2_5 "qwen2.5",
            qwen2_5_vl "qwen2.5-vl",
            qwen2_moe "qwen2-moe",
            qwen2_vl "qwen2-vl",
            qwen2_window "qwen2-window",
            qwen2_yarn "qwen2-yarn",
            qwen2_yarn_beyond "qwen2-yarn-beyond",
            qwen3 "qwen3",
            qwen3_5 "qwen3.5",
            qwen3_5_long "qwen3.5-long",
            qwen3_5_moe "qwen3.5-moe",
            qwen3_5_shared "qwen3.5-shared",
            qwen3_moe "qwen3-moe",
            qwen3_moe_all "qwen3-moe-all",
            qwen3_moe_window "qwen3-moe-window",
            qwen3_next "qwen3-next",
            qwen3_untied "qwen3-untied",
            qwen3_untyped "qwen3-untyped",
            qwen3_vl "qwen3-vl",
            qwen3_vl_moe "qwen3-vl-moe",
            sarvam_mla "sarvam_mla",
            sarvam_moe "sarvam_moe",
            seed_oss "seed_oss",
            smollm3 "smollm3",
            smolvlm "smolvlm",
            solar_open "solar_open",
            stablelm "stablelm",
            stablelm_beside "stablelm-beside",
            starcoder2 "starcoder2",
            starcoder2_window "starcoder2-window",
            vaultgemma "vaultgemma",
            youtu "youtu",
        );
    };
    ($name:ident: $run:path, twins) => {
        $crate::fixtures!(@tests $name, $run,
            afmoe_f32 "afmoe/model.f32.gguf",
            apertus_f32 "apertus/model.f32.gguf",
            arcee_f32 "arcee/model.f32.gguf",
            bloom_f32 "bloom/model.f32.gguf",
            cohere2_f32 "cohere2/model.f32.gguf",
            cohere2_moe_f32 "cohere2_moe/model.f32.gguf",
            cohere_f32 "cohere/model.f32.gguf",
            dbrx_f32 "dbrx/model.f32.gguf",
            deepseek2_lite_f32 "deepseek2-lite/model.f32.gguf",
            deepseek3_f32 "deepseek3/model.f32.gguf",
            deepseek3_q8_0 "deepseek3/model.q8_0.gguf",
            deepseek_v32_f32 "deepseek_v32/model.f32.gguf",
            dots1_f32 "dots1/model.f32.gguf",
            ernie4_5_f32 "ernie4_5/model.f32.gguf",
            exaone4_f32 "exaone4/model.f32.gguf",
            exaone4_full_f32 "exaone4-full/model.f32.gguf",
            exaone_f32 "exaone/model.f32.gguf",
            exaone_moe_f32 "exaone_moe/model.f32.gguf",
            falcon_f32 "falcon/model.f32.gguf",
            falcon_h1_f32 "falcon-h1/model.f32.gguf",
            falcon_mamba_f32 "falcon-mamba/model.f32.gguf",
            gemma2_f32 "gemma2/model.f32.gguf",
            gemma3_f32 "gemma3/model.f32.gguf",
            gemma3n_f32 "gemma3n/model.f32.gguf",
            gemma4_f32 "gemma4/model.f32.gguf",
            gemma4_moe_f32 "gemma4-moe/model.f32.gguf",
            gemma4_small_f32 "gemma4-small/model.f32.gguf",
            gemma_f32 "gemma/model.f32.gguf",
            glm4_f32 "glm4/model.f32.gguf",
            glm4_moe_lite_f32 "glm4-moe-lite/model.f32.gguf",
            glm_f32 "glm/model.f32.gguf",
            glm_moe_dsa_f32 "glm_moe_dsa/model.f32.gguf",
            gpt2_f32 "gpt2/model.f32.gguf",
            gpt_bigcode_f32 "gpt-bigcode/model.f32.gguf",
            gpt_neox_f32 "gpt-neox/model.f32.gguf",
            gpt_oss_f32 "gpt-oss/model.f32.gguf",
            granite4_hybrid_f32 "granite4-hybrid/model.f32.gguf",
            granite_f32 "granite/model.f32.gguf",
            granitemoe_f32 "granitemoe/model.f32.gguf",
            granitemoe_swa_f32 "granitemoe_swa/model.f32.gguf",
            granitemoeshared_f32 "granitemoeshared/model.f32.gguf",
            hunyuan_f32 "hunyuan/model.f32.gguf",
            hy_v3_f32 "hy_v3/model.f32.gguf",
            internlm2_f32 "internlm2/model.f32.gguf",
            iquestcoder_f32 "iquestcoder/model.f32.gguf",
            jais2_f32 "jais2/model.f32.gguf",
            jamba_f32 "jamba/model.f32.gguf",
            kimi_linear_heads_f32 "kimi_linear-heads/model.f32.gguf",
            laguna_f32 "laguna/model.f32.gguf",
            lfm2_f32 "lfm2/model.f32.gguf",
            ling2_f32 "ling2/model.f32.gguf",
            ling_f32 "ling/model.f32.gguf",
            llama3_beyond_f16 "llama3-beyond/model.f16.gguf",
            llama3_f32 "llama3/model.f32.gguf",
            llama4_f32 "llama4/model.f32.gguf",
            llama_linear_beyond_f16 "llama-linear-beyond/model.f16.gguf",
            llama_q4_k_m "llama-k-quants/model.q4_k_m.gguf",
            mamba2_f32 "mamba2/model.f32.gguf",
            mamba_f32 "mamba/model.f32.gguf",
            mellum_even_f32 "mellum-even/model.f32.gguf",
            mimo_v2_flash_f32 "mimo_v2_flash/model.f32.gguf",
            minicpm_f32 "minicpm/model.f32.gguf",
            ministral3_f32 "ministral3/model.f32.gguf",
            ministral3_own "ministral3/folder",
            mistral4_even_f32 "mistral4-even/model.f32.gguf",
            mistral_f16 "mistral-full/model.f16.gguf",
            mixtral_f32 "mixtral/model.f32.gguf",
            mixtral_q8_0_split "mixtral/model.q8_0-split.gguf",
            mlx "mlx/folder",
            mlx_glm4_moe "mlx-glm4-moe/folder",
            mlx_gpt2 "mlx-gpt2/folder",
            mlx_gpt_oss "mlx-gpt-oss/folder",
            mlx_llama4 "mlx-llama4/folder",
            mlx_mixtral "mlx-mixtral/folder",
            mlx_phimoe "mlx-phimoe/folder",
            mlx_qwen2_moe "mlx-qwen2-moe/folder",
            mlx_qwen3_5 "mlx-qwen3.5/folder",
            mlx_qwen3_5_moe "mlx-qwen3.5-moe/folder",
            mlx_qwen3_moe "mlx-qwen3-moe/folder",
            mlx_qwen3_next "mlx-qwen3-next/folder",
            mpt_f32 "mpt/model.f32.gguf",
            nemotron_f32 "nemotron/model.f32.gguf",
            nemotron_h_f32 "nemotron-h/model.f32.gguf",
            nemotron_nas_f32 "nemotron-nas/model.f32.gguf",
            olmo2_f32 "olmo2/model.f32.gguf",
            olmo3_f32 "olmo3/model.f32.gguf",
            olmo_clip_f32 "olmo-clip/model.f32.gguf",
            olmo_f32 "olmo/model.f32.gguf",
            olmoe_f32 "olmoe/model.f32.gguf",
            phi3_f32 "phi3/model.f32.gguf",
            phi3_short_f32 "phi3-short/model.f32.gguf",
            phi_f32 "phi/model.f32.gguf",
            qwen2_f16 "qwen2/model.f16.gguf",
            qwen2_moe_f32 "qwen2-moe/model.f32.gguf",
            qwen2_yarn_beyond_f16 "qwen2-yarn-beyond/model.f16.gguf",
            qwen2_yarn_f16 "qwen2-yarn/model.f16.gguf",
            qwen3_5_moe_f32 "qwen3.5-moe/model.f32.gguf",
            qwen3_5_shared_f32 "qwen3.5-shared/model.f32.gguf",
            qwen3_5_shared_q8_0 "qwen3.5-shared/model.q8_0.gguf",
            qwen3_bf16 "qwen3/model.bf16.gguf",
            qwen3_moe_all_f32 "qwen3-moe-all/model.f32.gguf",
            qwen3_next_f32 "qwen3-next/model.f32.gguf",
            qwen3_q8_0 "qwen3/model.q8_0.gguf",
            seed_oss_f32 "seed_oss/model.f32.gguf",
            smollm3_f32 "smollm3/model.f32.gguf",
            solar_open_f32 "solar_open/model.f32.gguf",
            stablelm_f32 "stablelm/model.f32.gguf",
            starcoder2_f32 "starcoder2/model.f32.gguf",
        );
    };
    (@tests $name:ident, $run:path, $($test:ident $path:literal,)+) => {
        mod $name {
            #[allow(unused_imports, reason = "a path to the function may begin in the module outside")]
            use super::*;

            /// The paths of all, below [`models`](crate::models).
            #[allow(dead_code, reason = "the list of all is for a test of the list")]
            pub(super) const ALL: &[&str] = &[$($path),+];

            $(
                #[test]
                fn $test() {
                    $run(&$crate::models().join($path));
                }
            )+
        }
    };
}

#[cfg(test)]
mod tests {
    use crate::models;
    use std::path::{Path, PathBuf};

    fn is_there(path: &Path) {
        assert!(path.exists(), "{}", path.display());
    }

    fixtures!(checkpoints: is_there);
    fixtures!(twins: is_there, twins);

    fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> {
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path())
    }

    #[test]
    fn none_is_missing_from_the_lists() {
        let (mut found, mut found_twins) = (vec![], vec![]);
        for folder in entries(&models()).filter(|path| path.is_dir()) {
            let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
            for path in entries(&folder) {
                let twin = path.file_name().unwrap().to_str().unwrap();
                if twin == "folder" || twin.ends_with(".gguf") {
                    found_twins.push(format!("{name}/{twin}"));
                }
            }
            if folder.join("config.json").exists() {
                found.push(name);
            }
        }
        for (listed, mut found) in [(checkpoints::ALL, found), (twins::ALL, found_twins)] {
            let mut listed: Vec<&str> = listed.to_vec();
            listed.sort_unstable();
            found.sort_unstable();
            assert_eq!(listed, found, "the lists in {}", file!());
        }
    }
}
