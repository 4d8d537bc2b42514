//! The emitted text: golden files that show it, its execution in both languages, and what it must
//! refuse.

use std::path::Path;

use tile::case::{self, Buffer};
use tile::emit::{self, Dialect};
use tile::interp;
use tile::ir::{Access, Kernel, ParamKind};
use tile::launch::Numbers;
use tile::passes::{self, Target};
use tile::proof::{CompiledText, ThreadOrder, Unproved};
use tile::types::Scalar;

#[path = "../emit/kernels.rs"]
mod kernels;

/// Compares with a golden file, or writes it when `BLESS` is set.
fn golden(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emit").join(name);
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, text).expect("the golden file is written");
        return;
    }
    let want = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = want.lines().zip(text.lines()).position(|(a, b)| a != b);
    let line = differs.unwrap_or(want.lines().count().min(text.lines().count()));
    assert!(
        want == text,
        "{name}, line {}: expected {:?}, found {:?}; hint: BLESS=1 writes the golden files anew",
        line + 1,
        want.lines().nth(line).unwrap_or("the end"),
        text.lines().nth(line).unwrap_or("the end"),
    );
}

fn without_prelude(kernels: &[Kernel], dialect: Dialect) -> String {
    let texts = kernels.iter().map(|k| emit::kernel_text(k, dialect, 0));
    let text = texts.collect::<Result<Vec<_>, _>>().expect("every kernel has a text").join("\n");
    // Line numbers move with every edit of a source above them: only the file's name stays.
    let mut out = String::new();
    for line in text.lines() {
        let kept = match line.rsplit_once(".rs:") {
            Some((kept, _)) => format!("{kept}.rs"),
            None => line.to_owned(),
        };
        out.push_str(&kept);
        out.push('\n');
    }
    out
}

#[test]
fn metal_text_is_as_agreed() {
    golden("kernels.metal", &without_prelude(&kernels::for_metal(), Dialect::Metal));
}

#[test]
fn cuda_text_is_as_agreed() {
    golden("kernels.cu", &without_prelude(&kernels::all(), Dialect::Cuda));
}

#[test]
fn kernels_are_verified() {
    for kernel in kernels::all().iter().chain(&kernels::for_metal()) {
        if let Err(fault) = tile::verify::verify(kernel) {
            panic!("{fault}");
        }
    }
}

fn target(dialect: Dialect) -> Target {
    match dialect {
        Dialect::Metal => Target::Metal,
        Dialect::Cuda => Target::Cuda,
    }
}

/// How many elements the buffers of a kernel have, and its numbers.
struct Launch {
    kernel: &'static str,
    lengths: &'static [usize],
    numbers: &'static [(&'static str, u32)],
}

const LAUNCHES: &[Launch] = &[
    Launch {
        kernel: "rms_norm_f16_group256",
        lengths: &[3 * 1032, 1032, 3 * 1032],
        numbers: &[("rows", 3), ("width", 1032), ("eps", 0x3727_C5AC)],
    },
    Launch {
        kernel: "numbers",
        lengths: &[64, 64, 64, 29 * 32, 19 * 32, 26 * 32],
        numbers: &[("by", 0x3F40_0000), ("shift", 3)],
    },
    Launch { kernel: "casts", lengths: &[32, 64, 64, 64, 64, 64, 64, 64, 96, 96], numbers: &[] },
    Launch {
        kernel: "vectors",
        lengths: &[256, 512, 128, 128, 128, 128, 256, 512, 64],
        numbers: &[],
    },
    Launch { kernel: "lanes", lengths: &[128, 128, 640, 768, 384], numbers: &[] },
    Launch { kernel: "control", lengths: &[256], numbers: &[("n", 64)] },
    Launch { kernel: "hand_over", lengths: &[224, 7, 2, 2, 2], numbers: &[("groups", 7)] },
    Launch { kernel: "copies", lengths: &[2048, 128, 64], numbers: &[("groups", 1), ("n", 40)] },
    Launch {
        kernel: "product_bf16",
        lengths: &[1024, 1024, 256, 256, 256],
        numbers: &[("depth", 64)],
    },
    Launch {
        kernel: "attention_f16",
        lengths: &[256, 256, 256, 256],
        numbers: &[("limit", 13), ("scale", 0x3E80_0000)],
    },
    Launch { kernel: "warpgroups", lengths: &[8192, 3072, 6144], numbers: &[] },
    Launch { kernel: "words_f16", lengths: &[512, 256], numbers: &[] },
    Launch { kernel: "words_bf16", lengths: &[512, 256], numbers: &[] },
];

impl Launch {
    fn numbers(&self) -> Numbers {
        self.numbers.iter().fold(Numbers::new(), |all, (name, bits)| all.with(name, *bits))
    }

    /// Inputs of seeded noise, outputs of zeros.
    fn buffers(&self, kernel: &Kernel) -> Vec<Buffer> {
        let mut lengths = self.lengths.iter();
        let mut buffers = Vec::new();
        for (seed, param) in kernel.params.iter().enumerate() {
            let ParamKind::Buffer { scalar, access } = param.kind else { continue };
            let len = *lengths.next().expect("a length for every buffer");
            // Conversions are tried out of range too.
            let range = if self.kernel == "casts" { 400.0 } else { 1.0 };
            let noise = case::noise(seed as u64 + 1, len).into_iter().map(|x| x * range);
            buffers.push(match (access, scalar.is_float()) {
                (Access::In, false) => {
                    let bits = noise.map(|x| ((x * 3.0e9) as i64 as u32).to_le_bytes());
                    let bytes = bits.flat_map(|b| b.into_iter().take(scalar.bytes())).collect();
                    Buffer::raw(scalar, bytes)
                }
                (Access::In | Access::InOut, true) => {
                    Buffer::floats(scalar, &noise.collect::<Vec<_>>())
                }
                _ => Buffer::zeros(scalar, len),
            });
        }
        buffers
    }
}

/// What a kernel is run with.
fn launch_of(kernel: &Kernel) -> &'static Launch {
    let own = LAUNCHES.iter().find(|launch| launch.kernel == kernel.name);
    own.expect("a launch for every kernel")
}

/// The kernels that a target has all the instructions of.
fn written(target: Target) -> Vec<Kernel> {
    let mut kernels = kernels::all();
    kernels.retain(|kernel| passes::fits(kernel, target).is_ok());
    kernels
}

/// All kernels lowered for a language, and their text with the instances that [`LAUNCHES`] asks
/// for.
fn lowered(dialect: Dialect) -> (Vec<Kernel>, String) {
    let target = target(dialect);
    let kernels: Vec<Kernel> = written(target)
        .iter()
        .map(|kernel| passes::lower(kernel, target).expect("the kernel is lowered"))
        .collect();
    let mut text = emit::text(&kernels, dialect).expect("every kernel has a text");
    if dialect == Dialect::Cuda {
        for kernel in &kernels {
            let instance = emit::cuda_instance(kernel, &launch_of(kernel).numbers());
            text.push_str(&instance.expect("every constant has a value").1);
        }
    }
    (kernels, text)
}

/// Runs every kernel's text in every schedule and compares what it leaves with what the interpreter
/// makes of the kernel as it was written.
fn compare(dialect: Dialect) {
    let (lowered, text) = lowered(dialect);
    let program = match CompiledText::compile(&text, &lowered, dialect) {
        Ok(program) => program,
        Err(Unproved::Skip(why)) => return testing::skipped(why),
        Err(wrong) => panic!("{wrong}"),
    };
    for (written, kernel) in written(target(dialect)).iter().zip(&lowered) {
        let launch = launch_of(kernel);
        let (numbers, mut want) = (launch.numbers(), launch.buffers(kernel));
        interp::run(written, &numbers, &mut want).expect("the interpreter runs the kernel");
        for schedule in ThreadOrder::ALL {
            let mut got = launch.buffers(kernel);
            program.run(kernel, &numbers, &mut got, schedule).expect("the text runs");
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let off = case::error(&got.to_f64(), &want.to_f64());
                let bound = case::tolerance(want.scalar);
                assert!(off <= bound, "{}: {schedule:?}: buffer {i}: {off:.1e}", kernel.name);
            }
        }
        // Two wrongs that agree on nothing: every kernel leaves something in its last buffer.
        let last = want.last().expect("every kernel has buffers");
        assert!(last.to_f64().iter().any(|x| *x != 0.0), "{}", kernel.name);
    }
}

#[test]
fn metal_text_computes_what_the_kernels_say() {
    compare(Dialect::Metal);
}

#[test]
fn cuda_text_computes_what_the_kernels_say() {
    compare(Dialect::Cuda);
}

/// The message of a refusal.
fn refused(kernel: &Kernel, dialect: Dialect) -> String {
    emit::text(std::slice::from_ref(kernel), dialect)
        .expect_err("the kernel is refused")
        .to_string()
}

#[test]
fn what_a_language_lacks_is_refused_by_name_and_line() {
    let found = refused(&kernels::product(Scalar::BF16).record(), Dialect::Metal);
    assert!(found.contains("expected tiles of 8 rows, found 16 x 16"), "{found}");
    let found = refused(&kernels::product(Scalar::F32).record(), Dialect::Cuda);
    assert!(found.starts_with("product_f32") && found.contains("kernels.rs:"), "{found}");
    assert!(found.contains("expected an operand of f16 or bf16, found f32"), "{found}");
    let found = refused(&kernels::for_metal()[9], Dialect::Cuda);
    assert!(found.contains("expected tiles of 16 rows, found 8 x"), "{found}");
    let warpgroups = &kernels::all()[10];
    let found = refused(warpgroups, Dialect::Metal);
    assert!(found.contains("expected tiles of 8 rows"), "{found}");
    let found = passes::lower(warpgroups, Target::Metal).expect_err("Metal has none").to_string();
    assert!(found.contains("metal has no wgmma") && found.contains("kernels.rs:"), "{found}");
    let found = refused(&kernels::hoard(10_000).record(), Dialect::Metal);
    assert!(found.contains("at most 32768 bytes of shared memory, found 40000"), "{found}");
    let found = refused(&kernels::hoard(100_000).record(), Dialect::Cuda);
    assert!(found.contains("at most 232448 bytes of shared memory, found 400000"), "{found}");
    let found = refused(&kernels::tally().record(), Dialect::Metal);
    assert!(found.contains("found both in `counts`"), "{found}");
    let mut kernel = kernels::hoard(8).record();
    kernel.name = "while".to_owned();
    assert!(refused(&kernel, Dialect::Cuda).contains("found a keyword"));
    let twins = [kernels::hoard(8).record(), kernels::hoard(8).record()];
    assert!(emit::text(&twins, Dialect::Metal).is_err_and(|f| f.message.contains("distinct")));
    let kernel = &kernels::all()[0];
    let fault = emit::cuda_instance(kernel, &Numbers::new().with("width", 8));
    assert!(fault.is_err_and(|f| f.message == "no value for constant `eps`"));
}

#[test]
fn large_shared_arrays_are_dynamic_on_cuda() {
    let (small, large) = (kernels::hoard(1_000).record(), kernels::hoard(20_000).record());
    assert_eq!((emit::cuda_dynamic_shared(&small), emit::cuda_dynamic_shared(&large)), (0, 80_000));
    let text = emit::text(&[large], Dialect::Cuda).expect("it fits a block");
    assert!(
        text.contains("float* const for_ = reinterpret_cast<float*>(tk_dynamic + 0);"),
        "{text}"
    );
}

#[test]
fn names_give_way_to_the_language_and_to_values() {
    let text =
        emit::text(&[kernels::hoard(8).record()], Dialect::Metal).expect("names are replaced");
    for wanted in ["float* half_ [[buffer(0)]]", "uint& v1_ [[buffer(1)]]", "float for_[8];"] {
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
}

#[test]
fn instances_are_named_after_their_constants() {
    let kernel = &kernels::all()[0];
    let numbers = Numbers::new().with("width", 64).with_f32("eps", 1.0);
    let (symbol, text) = emit::cuda_instance(kernel, &numbers).expect("both have values");
    assert_eq!(symbol, "rms_norm_f16_group256__64_3f800000");
    assert!(text.contains("rms_norm_f16_group256<64u, 1065353216u>(x, weight, y);"), "{text}");
    let plain = passes::specialise(kernel, &numbers);
    let (symbol, text) = emit::cuda_instance(&plain, &numbers).expect("there are no constants");
    assert_eq!((symbol.as_str(), text.as_str()), ("rms_norm_f16_group256", ""));
}

#[test]
fn results_are_posted_where_they_would_be_stored() {
    let kernel = kernels::doubled().record();
    let text = emit::cuda_posting(&kernel, 1, "struct tk_post;").expect("it writes floats alone");
    let own = &text[text.find("struct tk_post;").expect("the definition")..];
    for wanted in ["(const float* x, tk_post y) {", "tk_grid_wait(); y.begin();", "y[v"] {
        assert!(own.contains(wanted), "{wanted}: {own}");
    }
    assert!(!own.contains("float* y"), "{own}");
    // It reads `x`, writes whole numbers of `counts`, and `y` in several places and ways.
    let others = [(kernel, 0), (kernels::tally().record(), 0), (kernels::hand_over().record(), 4)];
    for (kernel, param) in others {
        let refused = emit::cuda_posting(&kernel, param, "");
        assert!(refused.is_err_and(|why| why.message.contains("written one by one")));
    }
}
