//! The parts of the text that are particular to CUDA C++. Tiles are 16 x 16: `mma.sync` m16n8k16
//! twice, so that a lane holds four 32-bit words of an operand, eight floats of an accumulator (two
//! of a row in each quadrant) and two of a row tile.

use std::fmt::Write;

use crate::instr::{BinaryOp, Spelling, UnaryOp};
use crate::ir::{
    Access as Rights, AtomicOp, Builtin, Inst, Kernel, LoadHint, ParamKind, Place, Reduce, SimdOp,
};
use crate::types::{Role, Scalar, Tile, Type};

use super::expr::{Access, Language, Text, binds, call};
use super::names::Names;
use super::{CUDA_STATIC, cuda_dynamic_shared};

/// CUDA C++.
#[derive(Default)]
pub(super) struct Cuda {
    /// The parameter that is a `tk_post`, by its number and by its name.
    pub(super) posted: Option<(usize, String)>,
}

/// The most shared memory of a block on compute capability 9.0, in bytes; 8.0 has 163 KiB.
const SHARED: u32 = 227 << 10;

#[rustfmt::skip]
pub(super) const RESERVED: &[&str] = &[
    "abs", "asm", "atomicCAS", "bf16", "blockDim", "blockIdx", "ceilf", "clock", "cosf", "dim3", "exp2f", "expf",
    "f16", "fabsf", "float2", "float4", "floorf", "fmaf", "gridDim", "int2", "int4", "log2f", "logf", "make_float2",
    "make_float4", "make_int2", "make_int4", "make_uint2", "make_uint4", "memcpy", "printf", "rintf", "rsqrtf",
    "schar", "sinf", "size_t", "sqrtf", "tanhf", "threadIdx", "uint2", "uint3", "uint4", "warpSize",
];

const LETTERS: [&str; 4] = ["x", "y", "z", "w"];

fn letter(i: u8) -> &'static str {
    LETTERS[usize::from(i % 4)]
}

/// Whether another kernel may still be writing this one's inputs when it starts. Only without that
/// may the compiler take inputs for constant memory and read them early.
fn overlaps(kernel: &Kernel) -> bool {
    let mut found = false;
    kernel.visit(&mut |node| {
        found |= matches!(node.inst, Inst::GridWait | Inst::Load { hint: LoadHint::Coherent, .. });
    });
    found
}

/// The parameters of the entry and of the template.
pub(super) fn signature(kernel: &Kernel, names: &Names, posted: Option<usize>) -> String {
    let restrict = if overlaps(kernel) { "" } else { " __restrict__" };
    let params = kernel.params.iter().zip(&names.params).enumerate();
    let params = params.map(|(i, (param, name))| match param.kind {
        _ if posted == Some(i) => format!("tk_post {name}"),
        ParamKind::Argument(scalar) => format!("{} {name}", scalar_name(scalar)),
        ParamKind::Buffer { scalar, access: Rights::In } => {
            format!("const {}*{restrict} {name}", scalar_name(scalar))
        }
        ParamKind::Buffer { scalar, .. } => format!("{}* {name}", scalar_name(scalar)),
    });
    params.collect::<Vec<_>>().join(", ")
}

/// Whether a buffer of floats can be posted: all that the kernel does with it is to write single
/// elements.
pub(super) fn postable(kernel: &Kernel, param: usize) -> bool {
    let Some(named) = kernel.params.get(param) else { return false };
    let own = Place::Buffer(u32::try_from(param).unwrap_or(u32::MAX));
    let (mut stored, mut other) = (false, false);
    kernel.visit(&mut |node| match &node.inst {
        Inst::Store { place, value, .. } if *place == own => {
            stored = true;
            other |= kernel.values[value.0 as usize] != Type::Scalar(Scalar::F32);
        }
        inst => other |= inst.reads().chain(inst.writes()).any(|place| place == own),
    });
    let floats = ParamKind::Buffer { scalar: Scalar::F32, access: Rights::Out };
    named.kind == floats && stored && !other && kernel.constants.is_empty()
}

/// The type of an element.
fn scalar_name(scalar: Scalar) -> &'static str {
    match scalar {
        Scalar::Bool => "bool",
        Scalar::I8 => "schar",
        Scalar::U8 => "uchar",
        Scalar::I16 => "short",
        Scalar::U16 => "ushort",
        Scalar::I32 => "int",
        Scalar::U32 => "uint",
        Scalar::F16 => "f16",
        Scalar::BF16 => "bf16",
        Scalar::F32 => "float",
    }
}

/// The template parameter of a constant: floats go by their bits.
fn parameter(scalar: Scalar, name: &str) -> String {
    match scalar {
        Scalar::F32 => format!("uint {name}_bits"),
        _ => format!("{} {name}", scalar_name(scalar)),
    }
}

/// The alignment of shared arrays, in bytes.
fn alignment(kernel: &Kernel) -> u32 {
    if kernel.has_swizzled() { 1024 } else { 16 }
}

/// The functions that begin a kernel's products of warpgroups, each once in a file: `wgmma` is an
/// instruction of its own for every number of columns, with all accumulators as operands.
pub(super) fn products(kernel: &Kernel) -> String {
    let mut out = String::new();
    kernel.visit(&mut |node| {
        let (sum, b, left) = match &node.inst {
            Inst::Wgmma { sum, b, .. } => (*sum, *b, Left::Block),
            Inst::WgmmaOf { sum, b, .. } => (*sum, *b, Left::Registers),
            _ => return,
        };
        let Place::Register(sum) = sum else { return };
        let scalar = scalar_name(kernel.element(b).scalar());
        let text = product(scalar, kernel.registers[sum as usize].len, left);
        if !out.contains(&text) {
            out.push_str(&text);
        }
    });
    out
}

/// Where the left side of a warpgroup's product is.
#[derive(Clone, Copy, PartialEq)]
enum Left {
    /// A block in shared memory.
    Block,
    /// Four operands in registers.
    Registers,
}

/// `c += a b'` over 64 terms: four instructions of sixteen, whose operands lie 32 bytes apart, or
/// have registers of their own.
fn product(scalar: &str, tiles: u32, left: Left) -> String {
    let lone = tiles == 1;
    let rows = |each: &dyn Fn(u32, u32) -> String| -> Vec<String> {
        let row = |tile| (0..8).map(|e| each(tile, e)).collect::<Vec<_>>().join(", ");
        (0..tiles).map(row).collect()
    };
    let registers = rows(&|tile, e| format!("%{}", 8 * tile + e)).join(", \" \\\n    \"");
    let operands = rows(&|tile, e| match lone {
        true => format!("\"+f\"(c[{e}])"),
        false => format!("\"+f\"(c[{tile}][{e}])"),
    });
    let operands = operands.join(",\n        ");
    let sums = if lone { "& c".to_owned() } else { format!(" (&c)[{tiles}]") };
    let first = 8 * tiles;
    let shape = format!("m64n{}k16.f32.{scalar}.{scalar}", 16 * tiles);
    let held = |s: u32| {
        let words: Vec<String> = (0..4).map(|i| format!("%{}", first + 4 * s + i)).collect();
        format!("TK_STEP(\"{{{}}}\")", words.join(", "))
    };
    let given = |s: u32| (0..4).map(move |i| format!("\"r\"(a{s}.word[{i}]), "));
    // Of the left side: how the function is named and what it takes, its place in an instruction and
    // what follows there, and how the next sixteen terms are found.
    let (of, parameter, a, turned, more) = match left {
        Left::Block => ("", format!("const {scalar}* a"), "", "a, b, p, 1, 1, 0, 0", "a, "),
        Left::Registers => {
            let parameters: Vec<_> = (0..4).map(|s| format!("const tk_operand& a{s}")).collect();
            ("of_", parameters.join(", "), "(a)", "\" a \", b, p, 1, 1, 0", "")
        }
    };
    let (steps, given, start, next, b) = match left {
        Left::Block => {
            let (steps, given) = (["TK_STEP"; 4].join(" TK_NEXT "), "\"l\"(tk_block(a)), ".into());
            (steps, given, format!(" mov.b64 a, %{first};"), "add.s64 a, a, 2; ", first + 1)
        }
        Left::Registers => {
            let steps: Vec<String> = (0..4).map(held).collect();
            let given: String = (0..4).flat_map(given).collect();
            (steps.join(" TK_NEXT\n      "), given, String::new(), "", first + 16)
        }
    };
    let yes = b + 1;
    let guard = format!("TK_WGMMA_{}{}_{tiles}", of.to_uppercase(), scalar.to_uppercase());
    format!(
        r#"#if !defined(TILE_SHIM) && !defined({guard})
#define {guard}
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "products of warpgroups need compute capability 9.0: compile for sm_90a"
#endif
#define TK_SUMS "{{{registers}}}"
#define TK_STEP{a} "wgmma.mma_async.sync.aligned.{shape} " TK_SUMS ", {turned};\n"
#define TK_NEXT "{next}add.s64 b, b, 2;\n"
TK_INLINE void tk_wgmma_{of}{scalar}(tk_frag<float, 8>{sums}, {parameter}, const {scalar}* b) {{
  asm volatile("{{.reg .pred p; .reg .b64 {more}b; setp.ne.b32 p, %{yes}, 0;{start} mov.b64 b, %{b};\n"
      {steps} "}}"
      : {operands}
      : {given}"l"(tk_block(b)), "r"(1)
      : "memory");
}}
#undef TK_SUMS
#undef TK_STEP
#undef TK_NEXT
#endif
"#
    )
}

impl Language for Cuda {
    fn reserved(&self) -> &'static [&'static str] {
        RESERVED
    }

    fn shared_limit(&self) -> u32 {
        SHARED
    }

    fn open(&self, kernel: &Kernel, names: &Names, builtins: &[Builtin], out: &mut String) {
        let constants: Vec<String> = kernel
            .constants
            .iter()
            .zip(&names.constants)
            .map(|(constant, name)| parameter(constant.scalar, name))
            .collect();
        let posted = self.posted.as_ref().map(|(i, _)| *i);
        let signature = signature(kernel, names, posted);
        let threads = kernel.launch.threads;
        let _ = match constants.is_empty() {
            true => writeln!(
                out,
                "extern \"C\" __global__ void __launch_bounds__({threads}) {}({signature}) {{",
                kernel.name
            ),
            false => writeln!(
                out,
                "template <{}>\n__device__ __forceinline__ void {}({signature}) {{",
                constants.join(", "),
                kernel.name
            ),
        };
        for (constant, name) in kernel.constants.iter().zip(&names.constants) {
            if constant.scalar == Scalar::F32 {
                let _ = writeln!(out, "  const float {name} = tk_bits<float>({name}_bits);");
            }
        }
        let places = [
            (Builtin::Thread, "tid", "threadIdx.x"),
            (Builtin::Lane, "lane", "threadIdx.x & 31u"),
            (Builtin::Simd, "simd", "threadIdx.x >> 5"),
        ];
        for (builtin, name, text) in places {
            if builtins.contains(&builtin) {
                let _ = writeln!(out, "  const uint {name} = {text};");
            }
        }
        if cuda_dynamic_shared(kernel) > 0 {
            let (align, bytes) = (alignment(kernel), kernel.shared_bytes());
            let _ = writeln!(out, "  TK_DYNAMIC(tk_dynamic, {align});  // {bytes} bytes");
        }
    }

    fn shared(
        &self,
        kernel: &Kernel,
        index: u32,
        name: &str,
        ty: &str,
        over: Option<&str>,
    ) -> String {
        let at = |memory: &str| format!("{ty}* const {name} = reinterpret_cast<{ty}*>({memory});");
        match over {
            _ if kernel.shared_bytes() > CUDA_STATIC => {
                at(&format!("tk_dynamic + {}", kernel.shared_offset(index)))
            }
            Some(other) => at(other),
            None => {
                let (align, len) = (alignment(kernel), kernel.shared_len(index));
                format!("__shared__ __align__({align}) {ty} {name}[{len}];")
            }
        }
    }

    fn scalar(&self, scalar: Scalar) -> &'static str {
        scalar_name(scalar)
    }

    /// 32-bit elements have CUDA's vector types; smaller ones travel as words.
    fn vector(&self, scalar: Scalar, lanes: u8) -> String {
        if scalar.bytes() == 4 {
            return format!("{}{lanes}", self.scalar(scalar));
        }
        match scalar.bytes() * usize::from(lanes) {
            2 => "ushort".to_owned(),
            4 => "uint".to_owned(),
            bytes => format!("uint{}", bytes / 4),
        }
    }

    fn extract(&self, vector: &Text, scalar: Scalar, lanes: u8, at: u8) -> Text {
        if scalar.bytes() == 4 {
            return Text::primary(format!("{}.{}", vector.within(binds::PRIMARY), letter(at)));
        }
        let per = (4 / scalar.bytes()) as u8;
        let word = match lanes <= per {
            true => vector.text.clone(),
            false => format!("{}.{}", vector.within(binds::PRIMARY), letter(at / per)),
        };
        Text::primary(format!("tk_part<{}>({word}, {})", self.scalar(scalar), at % per))
    }

    fn pack(&self, scalar: Scalar, elements: &[Text]) -> Text {
        let join =
            |texts: &[Text]| texts.iter().map(|t| t.text.as_str()).collect::<Vec<_>>().join(", ");
        let vector = self.vector(scalar, elements.len() as u8);
        if scalar.bytes() == 4 {
            return Text::primary(format!("make_{vector}({})", join(elements)));
        }
        let words: Vec<String> = elements
            .chunks(4 / scalar.bytes())
            .map(|chunk| format!("tk_pack({})", join(chunk)))
            .collect();
        match words.as_slice() {
            [word] => Text::primary(word.clone()),
            words => Text::primary(format!("make_{vector}({})", words.join(", "))),
        }
    }

    fn unary(&self, op: UnaryOp) -> Spelling {
        op.row().2
    }

    fn binary(&self, op: BinaryOp) -> Spelling {
        op.row().2
    }

    fn fma(&self) -> &'static str {
        "fmaf"
    }

    fn special(&self, bits: u32) -> Text {
        Text::primary(format!("tk_bits<float>({bits:#x}u)"))
    }

    fn widen(&self, value: &Text) -> Text {
        call("tk_f32", &[value])
    }

    fn bits(&self, to: Scalar, value: &Text) -> Text {
        call(&format!("tk_bits<{}>", self.scalar(to)), &[value])
    }

    fn builtin(&self, builtin: Builtin) -> String {
        match builtin {
            Builtin::Group(axis) => format!("blockIdx.{}", letter(axis)),
            Builtin::Groups(axis) => format!("gridDim.{}", letter(axis)),
            Builtin::Thread => "tid".to_owned(),
            Builtin::Lane => "lane".to_owned(),
            Builtin::Simd => "simd".to_owned(),
        }
    }

    fn pointer(&self, _: &Kernel, _: Place, ty: &str, write: bool) -> String {
        let constness = if write { "" } else { "const " };
        format!("{constness}{ty}*")
    }

    fn hinted(&self, hint: LoadHint, pointer: &str) -> Option<Text> {
        match hint {
            LoadHint::None => None,
            LoadHint::Stream => Some(Text::primary(format!("tk_stream({pointer})"))),
            LoadHint::Coherent => Some(Text::primary(format!("tk_coherent({pointer})"))),
        }
    }

    fn atomic(&self, op: AtomicOp, _: Place, _: Scalar, at: &str, value: &Text) -> Text {
        let name = match op {
            AtomicOp::Add => "atomicAdd",
            AtomicOp::Min => "atomicMin",
            AtomicOp::Max => "atomicMax",
            AtomicOp::Exchange => "atomicExch",
        };
        Text::primary(format!("{name}({at}, {})", value.text))
    }

    fn simd(&self, op: SimdOp, _: Scalar, value: &Text, lane: Option<&Text>) -> Text {
        let all = Text::primary("~0u");
        match op {
            SimdOp::Reduce(Reduce::Sum) => call("tk_simd_sum", &[value]),
            SimdOp::Reduce(Reduce::Max) => call("tk_simd_max", &[value]),
            SimdOp::Reduce(Reduce::Min) => call("tk_simd_min", &[value]),
            SimdOp::PrefixSum => call("tk_simd_prefix", &[value]),
            SimdOp::Shuffle => {
                let lane = lane.map_or_else(|| Text::primary("0"), Clone::clone);
                call("__shfl_sync", &[&all, value, &lane])
            }
            SimdOp::ShuffleXor(mask) => {
                let mask = Text::primary(mask.to_string());
                call("__shfl_xor_sync", &[&all, value, &mask])
            }
            SimdOp::Any => Text::new(format!("__any_sync(~0u, {}) != 0", value.text), binds::EQUAL),
            SimdOp::All => Text::new(format!("__all_sync(~0u, {}) != 0", value.text), binds::EQUAL),
            SimdOp::Ballot => call("__ballot_sync", &[&all, value]),
        }
    }

    fn signal(&self, inst: &Inst) -> String {
        match inst {
            Inst::Barrier => "__syncthreads();".to_owned(),
            Inst::SimdBarrier => "__syncwarp();".to_owned(),
            Inst::Fence => "__threadfence();".to_owned(),
            Inst::CopyCommit => "tk_copy_commit();".to_owned(),
            Inst::CopyWait(pending) => format!("tk_copy_wait<{pending}>();"),
            Inst::GridTrigger => "tk_grid_trigger();".to_owned(),
            Inst::GridWait => match &self.posted {
                Some((_, name)) => format!("tk_grid_wait(); {name}.begin();"),
                None => "tk_grid_wait();".to_owned(),
            },
            Inst::WgmmaFence => "tk_wgmma_fence();".to_owned(),
            Inst::WgmmaCommit => "tk_wgmma_commit();".to_owned(),
            Inst::WgmmaWait(pending) => format!("tk_wgmma_wait<{pending}>();"),
            Inst::AsyncFence => "tk_async_fence();".to_owned(),
            _ => String::new(),
        }
    }

    fn copy(&self, bytes: u32, to: &str, from: &str, keep: Option<&Text>) -> String {
        let keep = keep.map_or("true", |k| &k.text);
        format!("tk_copy_async<{bytes}>({to}, {from}, {keep});")
    }

    fn tile(&self, tile: Tile) -> Result<String, String> {
        if tile.rows != 16 {
            return Err(format!(
                "expected tiles of 16 rows, found {} x {}; hint: was the kernel lowered for Metal?",
                tile.rows, tile.cols
            ));
        }
        match tile.role {
            Role::A | Role::B if !matches!(tile.scalar, Scalar::F16 | Scalar::BF16) => {
                Err(format!(
                    "expected an operand of f16 or bf16, found {}; hint: cast to bf16 before the product",
                    tile.scalar
                ))
            }
            Role::A | Role::B => Ok("tk_operand".to_owned()),
            Role::C | Role::Row => {
                Ok(format!("tk_frag<{}, {}>", self.scalar(tile.scalar), self.lanes(tile)))
            }
        }
    }

    fn lanes(&self, tile: Tile) -> u32 {
        match tile.role {
            Role::A | Role::B => 4,
            Role::C => 8,
            Role::Row => 2,
        }
    }

    fn row_of_element(&self) -> &'static str {
        "[e / 2 % 2]"
    }

    fn tile_row(&self) -> Text {
        Text::primary("tk_tile_row(lane, e)")
    }

    fn tile_col(&self) -> Text {
        Text::primary("tk_tile_col(lane, e)")
    }

    fn tile_load(&self, access: &Access<'_>) -> Result<Text, String> {
        let (at, stride) = (&access.at, &access.stride.text);
        // A pair of halves moves as one word where that is aligned.
        let pairs = access.align >= 4;
        // Rows of eight halves move as one from shared memory; `.trans` turns each 8 x 8 on the
        // way.
        let rows = access.shared && access.align >= 16;
        let role = match access.tile.role {
            Role::A => "a",
            Role::B => "b",
            Role::C if access.tile.scalar.is_float() => {
                let transposed = access.transposed;
                return Ok(Text::primary(format!("tk_load_c<{transposed}>({at}, {stride})")));
            }
            _ => return Err("expected a matrix of floats to load, found another tile".to_owned()),
        };
        let turned = access.transposed;
        if let Some((array, index)) = &access.swizzled {
            if !rows {
                return Err("expected runs of eight elements of a swizzled tile".to_owned());
            }
            let index = &index.text;
            let function = format!("tk_load_{role}_swizzled<{turned}>");
            return Ok(Text::primary(format!("{function}({array}, {index}, {stride})")));
        }
        Ok(Text::primary(match rows {
            true => format!("tk_load_{role}_rows<{turned}>({at}, {stride})"),
            // Pairs lie along k, which an `A` has along its rows and a transposed `B` too.
            false => {
                let pairs = pairs && turned == (access.tile.role == Role::B);
                format!("tk_load_{role}<{turned}, {pairs}>({at}, {stride})")
            }
        }))
    }

    fn tile_store(&self, access: &Access<'_>, value: &str) -> Result<String, String> {
        if access.tile.role != Role::C || !access.tile.scalar.is_float() {
            return Err("expected an accumulator of floats to store, found another tile".to_owned());
        }
        let pairs = access.align as usize >= 2 * access.tile.scalar.bytes();
        Ok(format!("tk_store_c<{pairs}>({}, {}, {value});", access.at, access.stride.text))
    }

    fn mma(&self, (left, a): (Tile, &str), b: &str, c: &str) -> Result<Text, String> {
        let scalar = self.scalar(left.scalar);
        Ok(Text::primary(format!("tk_mma_{scalar}({a}, {b}, {c})")))
    }

    fn wgmma(&self, sum: &str, scalar: Scalar, a: &str, b: &str) -> Result<String, String> {
        Ok(format!("tk_wgmma_{}({sum}, {a}, {b});", self.scalar(scalar)))
    }

    fn wgmma_of(
        &self,
        sum: &str,
        scalar: Scalar,
        left: &[String],
        b: &str,
    ) -> Result<String, String> {
        Ok(format!("tk_wgmma_of_{}({sum}, {}, {b});", self.scalar(scalar), left.join(", ")))
    }

    fn hold(&self, sum: &str) -> String {
        format!("tk_hold({sum});")
    }

    fn row_reduce(&self, op: Reduce, value: &str) -> Text {
        Text::primary(match op {
            Reduce::Sum => format!("tk_row_sum({value})"),
            Reduce::Max => format!("tk_row_max({value})"),
            Reduce::Min => format!("tk_row_min({value})"),
        })
    }

    fn tile_of(&self, _: Tile, words: &[Text]) -> Result<Text, String> {
        let [a, b, c, d] = words else {
            return Err(format!("expected four words for an operand, found {}", words.len()));
        };
        Ok(call("tk_operand_of", &[a, b, c, d]))
    }

    fn to_left(&self, to: Tile, value: &str) -> Text {
        Text::primary(format!("tk_to_left_{}({value})", self.scalar(to.scalar)))
    }
}
