//! The parts of the text that are particular to Metal Shading Language. Tiles are 8 x 8; a lane
//! holds two neighbours of a row.

use std::fmt::Write;

use crate::instr::{BinaryOp, Spelling, UnaryOp};
use crate::ir::{
    Access as Rights, AtomicOp, Builtin, Inst, Kernel, LoadHint, ParamKind, Place, Reduce, SimdOp,
};
use crate::types::{Role, Scalar, Tile};

use super::expr::{Access, Language, Text, binds, call};
use super::names::Names;
use super::{METAL_SHARED, metal_constant};

/// Metal Shading Language, for one kernel of a file.
pub(super) struct Metal {
    /// The index of the kernel's first function constant.
    pub(super) first_constant: usize,
    /// Whether a barrier is one of device memory, too: see [`through_memory`].
    pub(super) device_barriers: bool,
}

/// Whether the threads of a group may hand each other something through device memory: a buffer is
/// both read and written, or a fence follows. Others' barriers are of threadgroup memory alone, and
/// so wait for no store.
///
/// Groups of one simdgroup keep both: Apple's compiler drops a barrier of threadgroup memory from
/// them, with what it orders (MoltenVK's issue 2711).
pub(super) fn through_memory(kernel: &Kernel) -> bool {
    let (mut loaded, mut stored) = (Vec::new(), Vec::new());
    let mut together = false;
    kernel.visit(&mut |node| {
        let buffer = |place: &Place| matches!(place, Place::Buffer(_));
        loaded.extend(node.inst.reads().filter(buffer));
        stored.extend(node.inst.writes().filter(buffer));
        together |= matches!(node.inst, Inst::Fence | Inst::Atomic { .. });
    });
    together || kernel.launch.threads <= 32 || stored.iter().any(|place| loaded.contains(place))
}

#[rustfmt::skip]
const RESERVED: &[&str] = &[
    "abs", "access", "as_type", "atomic_int", "atomic_uint", "bfloat", "bfloat2", "bfloat4", "buffer", "ceil",
    "char2", "char4", "clamp", "clz", "coherent", "constant", "cos", "cross", "device", "distance", "dot", "fabs",
    "fast", "floor", "fract", "fragment", "half", "half2", "half4", "float2", "float4", "int2", "int4", "kernel",
    "length", "log", "log2", "matrix", "metal", "mix", "mulhi", "normalize", "object_data", "pack", "patch",
    "popcount", "pow", "precise", "ptrdiff_t", "ray_data", "rint", "round", "rsqrt", "sampler", "saturate", "select",
    "short2", "short4", "sign", "simd_sum", "simd_vote", "sin", "size_t", "sqrt", "step", "tanh", "texture", "thread",
    "threadgroup", "threadgroup_imageblock", "trunc", "uchar2", "uchar4", "uint2", "uint3", "uint4", "ulong",
    "ushort2", "ushort4", "vec", "vertex", "visible",
];

/// Whether threadgroups of a kernel hand results to each other while it runs: a fence stands
/// between the two sides. A load with the hint that CUDA needs between kernels says nothing here,
/// where the encoder's barriers order them.
pub(super) fn hands_over(kernel: &Kernel) -> bool {
    let mut found = false;
    kernel.visit(&mut |node| found |= matches!(node.inst, Inst::Fence));
    found
}

/// Whether a buffer is what threadgroups hand over: a kernel with a fence both writes it and loads
/// from it. What only atomics and a reset touch is never so: atomics are coherent by themselves,
/// and no cast may drop the qualifier on the way to one.
fn is_handed(kernel: &Kernel, place: Place) -> bool {
    let (mut loaded, mut stored) = (false, false);
    kernel.visit(&mut |node| {
        loaded |= node.inst.reads().any(|read| read == place);
        stored |= node.inst.writes() == Some(place);
    });
    loaded && stored && hands_over(kernel)
}

/// Refuses a kernel whose atomics touch what its threadgroups hand over: the two have different
/// types in Metal.
pub(super) fn check(kernel: &Kernel) -> Result<(), String> {
    let mut atomics = Vec::new();
    kernel.visit(&mut |node| {
        if let Inst::Atomic { place: place @ Place::Buffer(_), .. } = node.inst {
            atomics.push(place);
        }
    });
    match atomics.into_iter().find(|place| is_handed(kernel, *place)) {
        Some(place) => {
            let name = kernel.place_name(place);
            Err(format!(
                "expected atomics and handed results in buffers of their own, found both in `{name}`"
            ))
        }
        None => Ok(()),
    }
}

/// `device`, `threadgroup` or nothing, as a prefix.
fn space(kernel: &Kernel, place: Place) -> &'static str {
    match place {
        Place::Buffer(_) if is_handed(kernel, place) => "TK_COHERENT device ",
        Place::Buffer(_) => "device ",
        Place::Shared(_) => "threadgroup ",
        Place::Register(_) => "thread ",
    }
}

fn reads_only(kernel: &Kernel, place: Place) -> bool {
    let Place::Buffer(i) = place else { return false };
    let kind = kernel.params[i as usize].kind;
    matches!(kind, ParamKind::Buffer { access: Rights::In, .. })
}

const LETTERS: [&str; 4] = ["x", "y", "z", "w"];

fn letter(i: u8) -> &'static str {
    LETTERS[usize::from(i % 4)]
}

impl Metal {
    /// A vector as words: what has no type of its own. `(words, elements per word)`.
    fn words(scalar: Scalar, lanes: u8) -> (u8, u8) {
        let per = (4 / scalar.bytes()) as u8;
        (lanes / per.max(1), per)
    }
}

impl Language for Metal {
    fn reserved(&self) -> &'static [&'static str] {
        RESERVED
    }

    fn shared_limit(&self) -> u32 {
        METAL_SHARED
    }

    fn open(&self, kernel: &Kernel, names: &Names, builtins: &[Builtin], out: &mut String) {
        for (i, constant) in kernel.constants.iter().enumerate() {
            let _ = writeln!(
                out,
                "constant {} {} [[function_constant({})]];",
                self.scalar(constant.scalar),
                metal_constant(kernel, &constant.name),
                self.first_constant + i
            );
        }
        let mut params = Vec::new();
        for (i, (param, name)) in kernel.params.iter().zip(&names.params).enumerate() {
            let text = match param.kind {
                ParamKind::Argument(scalar) => format!("constant {}& {name}", self.scalar(scalar)),
                ParamKind::Buffer { scalar, .. } => {
                    let ty = self.scalar(scalar);
                    let place = Place::Buffer(i as u32);
                    let pointer = self.pointer(kernel, place, ty, !reads_only(kernel, place));
                    format!("{pointer} {name}")
                }
            };
            params.push(format!("{text} [[buffer({i})]]"));
        }
        let used = |wanted: fn(&Builtin) -> bool| builtins.iter().any(wanted);
        let places = [
            (
                used(|b| matches!(b, Builtin::Group(_))),
                "uint3 group [[threadgroup_position_in_grid]]",
            ),
            (used(|b| matches!(b, Builtin::Groups(_))), "uint3 groups [[threadgroups_per_grid]]"),
            (used(|b| matches!(b, Builtin::Thread)), "uint tid [[thread_index_in_threadgroup]]"),
            (used(|b| matches!(b, Builtin::Lane)), "uint lane [[thread_index_in_simdgroup]]"),
            (used(|b| matches!(b, Builtin::Simd)), "uint simd [[simdgroup_index_in_threadgroup]]"),
        ];
        params.extend(places.iter().filter(|(used, _)| *used).map(|(_, text)| (*text).to_owned()));
        let _ = write!(
            out,
            "[[max_total_threads_per_threadgroup({})]]\nkernel void {}(\n    {}) {{\n",
            kernel.launch.threads,
            kernel.name,
            params.join(",\n    ")
        );
        for (constant, name) in kernel.constants.iter().zip(&names.constants) {
            let (ty, symbol) =
                (self.scalar(constant.scalar), metal_constant(kernel, &constant.name));
            let _ = writeln!(out, "  const {ty} {name} = {symbol};");
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
        match over {
            Some(other) => {
                format!("threadgroup {ty}* const {name} = (threadgroup {ty}*)({other});")
            }
            None => format!("alignas(16) threadgroup {ty} {name}[{}];", kernel.shared_len(index)),
        }
    }

    fn scalar(&self, scalar: Scalar) -> &'static str {
        match scalar {
            Scalar::Bool => "bool",
            Scalar::I8 => "char",
            Scalar::U8 => "uchar",
            Scalar::I16 => "short",
            Scalar::U16 => "ushort",
            Scalar::I32 => "int",
            Scalar::U32 => "uint",
            Scalar::F16 => "half",
            Scalar::BF16 => "bfloat",
            Scalar::F32 => "float",
        }
    }

    fn vector(&self, scalar: Scalar, lanes: u8) -> String {
        match lanes {
            2 | 4 => format!("{}{lanes}", self.scalar(scalar)),
            _ => format!("uint{}", Metal::words(scalar, lanes).0),
        }
    }

    fn extract(&self, vector: &Text, scalar: Scalar, lanes: u8, at: u8) -> Text {
        let vector = vector.within(binds::PRIMARY);
        if lanes <= 4 {
            return Text::primary(format!("{vector}.{}", letter(at)));
        }
        let (_, per) = Metal::words(scalar, lanes);
        let part = format!("{}{per}", self.scalar(scalar));
        let word = letter(at / per);
        Text::primary(format!("as_type<{part}>({vector}.{word}).{}", letter(at % per)))
    }

    fn pack(&self, scalar: Scalar, elements: &[Text]) -> Text {
        let lanes = elements.len() as u8;
        let join =
            |texts: &[Text]| texts.iter().map(|t| t.text.as_str()).collect::<Vec<_>>().join(", ");
        if lanes <= 4 {
            return Text::primary(format!("{}({})", self.vector(scalar, lanes), join(elements)));
        }
        let (words, per) = Metal::words(scalar, lanes);
        let part = self.scalar(scalar);
        let words_text: Vec<String> = elements
            .chunks(usize::from(per))
            .map(|chunk| format!("as_type<uint>({part}{per}({}))", join(chunk)))
            .collect();
        Text::primary(format!("uint{words}({})", words_text.join(", ")))
    }

    fn unary(&self, op: UnaryOp) -> Spelling {
        op.row().1
    }

    fn binary(&self, op: BinaryOp) -> Spelling {
        op.row().1
    }

    fn fma(&self) -> &'static str {
        "fma"
    }

    fn special(&self, bits: u32) -> Text {
        match f32::from_bits(bits) {
            f32::INFINITY => Text::primary("INFINITY"),
            f32::NEG_INFINITY => Text::new("-INFINITY", binds::UNARY),
            _ => Text::primary(format!("as_type<float>({bits:#x}u)")),
        }
    }

    fn widen(&self, value: &Text) -> Text {
        call("float", &[value])
    }

    fn bits(&self, to: Scalar, value: &Text) -> Text {
        call(&format!("as_type<{}>", self.scalar(to)), &[value])
    }

    fn builtin(&self, builtin: Builtin) -> String {
        match builtin {
            Builtin::Group(axis) => format!("group.{}", letter(axis)),
            Builtin::Groups(axis) => format!("groups.{}", letter(axis)),
            Builtin::Thread => "tid".to_owned(),
            Builtin::Lane => "lane".to_owned(),
            Builtin::Simd => "simd".to_owned(),
        }
    }

    fn pointer(&self, kernel: &Kernel, place: Place, ty: &str, write: bool) -> String {
        let constness = if write { "" } else { "const " };
        format!("{}{constness}{ty}*", space(kernel, place))
    }

    fn hinted(&self, _: LoadHint, _: &str) -> Option<Text> {
        None
    }

    fn atomic(&self, op: AtomicOp, place: Place, scalar: Scalar, at: &str, value: &Text) -> Text {
        let name = match op {
            AtomicOp::Add => "atomic_fetch_add_explicit",
            AtomicOp::Min => "atomic_fetch_min_explicit",
            AtomicOp::Max => "atomic_fetch_max_explicit",
            AtomicOp::Exchange => "atomic_exchange_explicit",
        };
        // Coherence is the atomic's own: see `is_handed`, which keeps the qualifier away from what
        // only atomics touch.
        let space = if matches!(place, Place::Shared(_)) { "threadgroup" } else { "device" };
        let ty = format!("atomic_{}", self.scalar(scalar));
        Text::primary(format!(
            "{name}(({space} {ty}*)({at}), {}, memory_order_relaxed)",
            value.text
        ))
    }

    fn simd(&self, op: SimdOp, scalar: Scalar, value: &Text, lane: Option<&Text>) -> Text {
        let lane = lane.map_or_else(|| Text::primary("0"), Clone::clone);
        let lane = Text::primary(format!("ushort({})", lane.text));
        // Through unsigned numbers: those wrap.
        let sum = |name: &str| match scalar {
            Scalar::I32 => Text::primary(format!("int({name}(uint({})))", value.text)),
            _ => call(name, &[value]),
        };
        match op {
            SimdOp::Reduce(Reduce::Sum) => sum("simd_sum"),
            SimdOp::Reduce(Reduce::Max) => call("simd_max", &[value]),
            SimdOp::Reduce(Reduce::Min) => call("simd_min", &[value]),
            SimdOp::PrefixSum => sum("simd_prefix_exclusive_sum"),
            SimdOp::Shuffle => call("simd_shuffle", &[value, &lane]),
            SimdOp::ShuffleXor(mask) => {
                call("simd_shuffle_xor", &[value, &Text::primary(format!("ushort({mask})"))])
            }
            SimdOp::Any => call("simd_any", &[value]),
            SimdOp::All => call("simd_all", &[value]),
            SimdOp::Ballot => call("tk_ballot", &[value]),
        }
    }

    fn signal(&self, inst: &Inst) -> String {
        match inst {
            Inst::Barrier if self.device_barriers => {
                "threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);"
            }
            Inst::Barrier => "threadgroup_barrier(mem_flags::mem_threadgroup);",
            Inst::SimdBarrier => "simdgroup_barrier(mem_flags::mem_threadgroup);",
            Inst::Fence => {
                "atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device);"
            }
            // Copies are made at once, and a command buffer's kernels are ordered by its encoder.
            _ => "",
        }
        .to_owned()
    }

    fn copy(&self, bytes: u32, to: &str, from: &str, keep: Option<&Text>) -> String {
        let ty = match bytes {
            4 => "uint",
            8 => "uint2",
            _ => "uint4",
        };
        let keep = keep.map_or("true", |k| &k.text);
        format!("tk_copy((threadgroup {ty}*)({to}), (device const {ty}*)({from}), {keep});")
    }

    fn tile(&self, tile: Tile) -> Result<String, String> {
        if tile.rows != 8 {
            return Err(format!(
                "expected tiles of 8 rows, found {} x {}; hint: lower the kernel for Metal first",
                tile.rows, tile.cols
            ));
        }
        let element = self.scalar(tile.scalar);
        match tile.role {
            Role::Row => Ok(element.to_owned()),
            Role::A | Role::B if !tile.scalar.is_float() => {
                Err(format!("expected an operand of f16, bf16 or f32, found {}", tile.scalar))
            }
            Role::A | Role::B | Role::C => Ok(format!("{element}2")),
        }
    }

    fn lanes(&self, tile: Tile) -> u32 {
        if tile.role == Role::Row { 1 } else { 2 }
    }

    fn row_of_element(&self) -> &'static str {
        ""
    }

    fn tile_row(&self) -> Text {
        Text::primary("tk_tile_row(lane)")
    }

    fn tile_col(&self) -> Text {
        Text::new("tk_tile_col(lane) + e", binds::SUM)
    }

    fn tile_load(&self, access: &Access<'_>) -> Result<Text, String> {
        if access.tile.role == Role::Row || !access.tile.scalar.is_float() {
            return Err("expected a matrix of floats to load, found another tile".to_owned());
        }
        let (ty, at, stride) = (self.scalar(access.tile.scalar), &access.at, &access.stride.text);
        if let Some((array, index)) = &access.swizzled {
            let (turned, index) = (access.transposed, &index.text);
            let function = format!("tk_tile_load_swizzled<{ty}, {turned}>");
            return Ok(Text::primary(format!("{function}({array}, {index}, {stride}, lane)")));
        }
        let function = if access.transposed { "tk_tile_load_t" } else { "tk_tile_load" };
        Ok(Text::primary(format!("{function}<{ty}>({at}, {stride})")))
    }

    fn tile_store(&self, access: &Access<'_>, value: &str) -> Result<String, String> {
        if access.tile.role != Role::C || !access.tile.scalar.is_float() {
            return Err("expected an accumulator of floats to store, found another tile".to_owned());
        }
        Ok(format!("tk_tile_store({}, {}, {value});", access.at, access.stride.text))
    }

    fn mma(&self, (_, a): (Tile, &str), b: &str, c: &str) -> Result<Text, String> {
        Ok(Text::primary(format!("tk_mma({a}, {b}, {c})")))
    }

    fn wgmma(&self, _: &str, _: Scalar, _: &str, _: &str) -> Result<String, String> {
        Err("expected products of simdgroups, found one of a warpgroup".to_owned())
    }

    fn wgmma_of(&self, sum: &str, of: Scalar, _: &[String], b: &str) -> Result<String, String> {
        self.wgmma(sum, of, b, b)
    }

    fn hold(&self, _: &str) -> String {
        String::new()
    }

    fn row_reduce(&self, op: Reduce, value: &str) -> Text {
        Text::primary(match op {
            Reduce::Sum => format!("tk_row_sum({value})"),
            Reduce::Max => format!("tk_row_max({value})"),
            Reduce::Min => format!("tk_row_min({value})"),
        })
    }

    fn tile_of(&self, to: Tile, words: &[Text]) -> Result<Text, String> {
        let [word] = words else {
            return Err(format!("expected one word for an operand, found {}", words.len()));
        };
        let function = if to.role == Role::A { "tk_left_of" } else { "tk_right_of" };
        Ok(Text::primary(format!("{function}<{}>({}, lane)", self.scalar(to.scalar), word.text)))
    }

    fn to_left(&self, to: Tile, value: &str) -> Text {
        let ty = self.scalar(to.scalar);
        Text::primary(format!("{ty}2({ty}({value}.x), {ty}({value}.y))"))
    }
}
