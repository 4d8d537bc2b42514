//! The manifest of a build: per kernel all that a launch needs to know, as JSON.
//!
//! A program that has no chooser of its own takes a kernel of a family that its target has, whose
//! parameters have the wanted types, whose settings have the wanted values, and whose requirements
//! hold for the sizes at hand. Where several are left they must agree in all settings, since a
//! setting decides what a kernel computes (`format: block_q4_k`); then each computes it, in its own
//! schedule, and the first that [`Metal::preferred`] marks is taken, else the first. `Launch.swift`
//! does so ([`crate::wrappers::swift_runtime`]).
//!
//! [`KernelEntry::kernel`] turns an entry back into a kernel without a body, whose [`Kernel::bind`]
//! checks a launch and gives the grid: whoever holds the manifest and the built text needs nothing
//! else. Sizes are written as in the text form (`ceil_div(rows * width, 256)`), over constants,
//! `u32` arguments and the free `dimensions`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::emit;
use crate::ir::{Access, Kernel, ParamKind};
use crate::text;
use crate::types::Scalar;
use crate::verify::Fault;

/// The version of the format, raised when a reader of the old one would be misled.
pub const VERSION: u32 = 3;

/// The settings that decide how fast a kernel is, and in which order it adds, but not what it
/// computes.
const SCHEDULES: [&str; 5] = ["schedule", "tiling", "shares", "team", "block"];

/// Every kernel of a build.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`VERSION`].
    pub version: u32,
    /// In the order they were built.
    pub kernels: Vec<KernelEntry>,
}

/// One kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelEntry {
    /// Its name: the Metal function, and the CUDA symbol or template.
    pub name: String,
    /// The operation whose kernels it is one of: `rms_norm`.
    pub family: String,
    /// The values that decide what it computes, by name: `"format": "block_q4_k"`; `function` is
    /// the name of the Rust function that recorded it. Empty if no recipe did.
    pub settings: BTreeMap<String, String>,
    /// The values that decide only how it does so.
    pub schedule: BTreeMap<String, String>,
    /// The unit of work of a threadgroup: `element`, `row`, `vector` or `tile`.
    pub mode: String,
    /// Buffers and arguments in binding order: Metal's buffer index, CUDA's parameter index.
    pub params: Vec<ParamEntry>,
    /// Specialisation constants.
    pub constants: Vec<ConstantEntry>,
    /// Names in `grid` and `requires` that neither constants nor arguments give.
    pub dimensions: Vec<String>,
    /// Threadgroups along each axis.
    pub grid: [String; 3],
    /// Threads of a threadgroup.
    pub threads: u32,
    /// The conditions that must hold at bind time.
    pub requires: Vec<String>,
    /// Bytes of threadgroup memory, declared by the text itself on Metal.
    pub shared_bytes: u32,
    /// Its needs on Metal; absent where it cannot run there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metal: Option<Metal>,
    /// Its needs on CUDA.
    pub cuda: CudaNeeds,
}

/// The needs of a kernel on Metal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Metal {
    /// The version of the language: `[3, 1]`.
    pub language: [u32; 2],
    /// The first macOS that has it: `14.0`.
    pub macos: String,
    /// The first iOS that has it: `17.0`.
    pub ios: String,
    /// Whether its schedule is one for Apple's GPUs, and so goes before others.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub preferred: bool,
}

/// The needs of a kernel on CUDA.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CudaNeeds {
    /// The oldest architecture that runs it, `sm_80`, or the only one: `sm_90a`.
    pub architecture: String,
    /// Bytes of dynamic shared memory that a launch has to ask for.
    pub dynamic_shared_bytes: u32,
}

/// A buffer or a scalar argument.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ParamEntry {
    /// Its name.
    pub name: String,
    /// Metal's buffer index, CUDA's parameter index.
    pub index: u32,
    /// `buffer` or `argument`.
    pub kind: String,
    /// Element type.
    pub dtype: String,
    /// `in`, `out` or `inout`; absent for arguments.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<String>,
}

/// A specialisation constant.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ConstantEntry {
    /// Its name.
    pub name: String,
    /// Its type.
    pub dtype: String,
    /// The name of its Metal function constant.
    pub metal: String,
    /// The index of that, CUDA's template parameter index.
    pub index: u32,
}

impl Manifest {
    /// The manifest of kernels, each with its family.
    pub fn of<'a>(kernels: impl IntoIterator<Item = (&'a str, &'a Kernel)>) -> Manifest {
        let entry = |(family, kernel)| KernelEntry::of(family, kernel);
        Manifest { version: VERSION, kernels: kernels.into_iter().map(entry).collect() }
    }

    /// As JSON.
    pub fn to_json(&self) -> String {
        // Strings and numbers only: nothing that could fail to be written.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// Parses JSON.
    ///
    /// # Errors
    /// One line: where the JSON is no manifest, or that its version is another.
    pub fn parse(json: &str) -> Result<Manifest, String> {
        let found: Manifest = serde_json::from_str(json).map_err(|e| format!("manifest: {e}"))?;
        if found.version != VERSION {
            return Err(format!("manifest: expected version {VERSION}, found {}", found.version));
        }
        Ok(found)
    }

    /// The entry of a kernel.
    pub fn get(&self, name: &str) -> Option<&KernelEntry> {
        self.kernels.iter().find(|entry| entry.name == name)
    }
}

impl Metal {
    /// The needs of a kernel that Metal takes.
    fn of(kernel: &Kernel) -> Metal {
        let (major, minor) = emit::metal_version(kernel);
        let [macos, ios] =
            emit::metal_systems((major, minor)).map(|version| format!("{version}.0"));
        Metal { language: [major, minor], macos, ios, preferred: false }
    }
}

/// How the text form and the manifest write an access.
fn access_name(access: Access) -> &'static str {
    match access {
        Access::In => "in",
        Access::Out => "out",
        Access::InOut => "inout",
    }
}

impl KernelEntry {
    /// The entry of a kernel of a family.
    pub fn of(family: &str, kernel: &Kernel) -> KernelEntry {
        let param = |(index, p): (u32, &crate::ir::Param)| {
            let (kind, scalar, access) = match p.kind {
                ParamKind::Buffer { scalar, access } => {
                    ("buffer", scalar, Some(access_name(access).to_owned()))
                }
                ParamKind::Argument(scalar) => ("argument", scalar, None),
            };
            let (name, kind) = (p.name.clone(), kind.to_owned());
            ParamEntry { name, index, kind, dtype: scalar.to_string(), access }
        };
        let constant = |(index, c): (u32, &crate::ir::Constant)| ConstantEntry {
            name: c.name.clone(),
            dtype: c.scalar.to_string(),
            metal: emit::metal_constant(kernel, &c.name),
            index,
        };
        let settings = kernel.settings.iter().map(|s| (s.name.clone(), s.value.clone()));
        let (schedule, settings) =
            settings.partition(|(name, _)| SCHEDULES.contains(&name.as_str()));
        KernelEntry {
            name: kernel.name.clone(),
            family: family.to_owned(),
            settings,
            schedule,
            mode: kernel.launch.mode.name().to_owned(),
            params: (0..).zip(&kernel.params).map(param).collect(),
            constants: (0..).zip(&kernel.constants).map(constant).collect(),
            dimensions: kernel.dimensions().into_iter().map(str::to_owned).collect(),
            grid: kernel.launch.grid.clone().map(|extent| extent.to_string()),
            threads: kernel.launch.threads,
            requires: kernel.launch.requirements.iter().map(ToString::to_string).collect(),
            shared_bytes: kernel.shared_bytes(),
            metal: emit::metal_takes(kernel).then(|| Metal::of(kernel)),
            cuda: CudaNeeds {
                architecture: if kernel.has_wgmma() { "sm_90a" } else { "sm_80" }.to_owned(),
                dynamic_shared_bytes: emit::cuda_dynamic_shared(kernel),
            },
        }
    }

    /// The kernel without its body: parameters, constants and contract. Its shared memory is one
    /// array of the right size.
    ///
    /// # Errors
    /// A [`Fault`] in the lines of the text form that the entry stands for.
    pub fn kernel(&self) -> Result<Kernel, Fault> {
        let mut lines = vec![format!("kernel {} {{", self.name), format!("mode {}", self.mode)];
        lines.push(format!("grid {}", self.grid.join(", ")));
        lines.push(format!("threads {}", self.threads));
        lines.extend(self.requires.iter().map(|rule| format!("require {rule}")));
        for p in &self.params {
            let access = p.access.as_ref().map_or(String::new(), |access| format!(" {access}"));
            lines.push(format!("{} {}: {}{access}", p.kind, p.name, p.dtype));
        }
        lines.extend(self.constants.iter().map(|c| format!("constant {}: {}", c.name, c.dtype)));
        if self.shared_bytes > 0 {
            lines.push(format!("shared all: {}[{}]", Scalar::U8, self.shared_bytes));
        }
        lines.push("body {\n}\n}\n".to_owned());
        text::parse(&lines.join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dsl::*;
    use crate::launch::{BoundBuffer, Mode, Numbers, Requirement};

    fn sample() -> Kernel {
        build("scaled_rows_f16", || {
            let x = <In>::stored("x", Scalar::F16);
            let y = <Out>::stored("y", Scalar::F16);
            let by = Arg::<f32>::declare("by");
            let width = Const::<u32>::declare("width");
            launch(Mode::Row, [dim("rows").ceil_div(2u32), fixed(1), fixed(1)], 64);
            require(Requirement::Divisible(dim("width"), 8));
            require(Requirement::Length("x".into(), (dim("rows") + 1u32) * dim("width")));
            require(Requirement::Aligned("y".into(), 16));
            let scratch = Shared::<f32>::new(100);
            scratch.set(thread_id(), by);
            strided(width).each(|i| y.set(i, x.get(i)));
        })
    }

    #[test]
    fn an_entry_alone_tells_how_to_launch() {
        let kernel = sample();
        let json = Manifest::of([("scaled_rows", &kernel)]).to_json();
        let read = Manifest::parse(&json).unwrap();
        let entry = read.get("scaled_rows_f16").unwrap();
        assert_eq!((&*entry.family, &*entry.dimensions), ("scaled_rows", &["rows".to_owned()][..]));
        let indices: Vec<u32> = entry.params.iter().map(|p| p.index).collect();
        assert_eq!((&indices[..], entry.constants[0].index), (&[0, 1, 2][..], 0));
        let metal = entry.metal.as_ref().unwrap();
        assert_eq!((metal.language, &*metal.macos, &*metal.ios), ([3, 1], "14.0", "17.0"));
        let shell = entry.kernel().unwrap();
        assert_eq!(shell.launch, kernel.launch);
        assert_eq!((&shell.params, &shell.constants), (&kernel.params, &kernel.constants));
        assert_eq!(shell.shared_bytes(), kernel.shared_bytes());
        let numbers = Numbers::new().with("rows", 5).with("width", 16).with_f32("by", 2.0);
        let buffers = [BoundBuffer { len: 96, align: 256 }, BoundBuffer { len: 80, align: 256 }];
        assert_eq!(shell.bind(&numbers, &buffers).unwrap(), [3, 1, 1]);
        assert!(shell.bind(&numbers.clone().with("width", 12), &buffers).is_err());
        let short = [BoundBuffer { len: 95, align: 256 }, buffers[1]];
        assert!(shell.bind(&numbers, &short).is_err());
    }

    #[test]
    fn an_entry_tells_what_computes_from_how() {
        let setting = |(name, value): (&str, &str)| crate::ir::KernelSetting {
            name: name.to_owned(),
            value: value.to_owned(),
        };
        let of = [("function", "gemv"), ("format", "block_q4_k"), ("schedule", "threads64")];
        let kernel = Kernel { settings: of.map(setting).to_vec(), ..sample() };
        let json = Manifest::of([("scaled_rows", &kernel)]).to_json();
        let entry = &Manifest::parse(&json).unwrap().kernels[0];
        let words = |map: &BTreeMap<String, String>| {
            map.iter().map(|(name, value)| format!("{name} {value}")).collect::<Vec<_>>()
        };
        assert_eq!(words(&entry.settings), ["format block_q4_k", "function gemv"]);
        assert_eq!(words(&entry.schedule), ["schedule threads64"]);
    }

    /// A kernel that a target cannot run has no entry for that target.
    #[test]
    fn an_entry_says_which_targets_have_it() {
        let large = build("large", || {
            let y = Out::<f32>::declare("y");
            launch(Mode::Row, [fixed(1), fixed(1), fixed(1)], 32);
            let scratch = Shared::<f32>::new(1 + (emit::METAL_SHARED / 4));
            scratch.set(thread_id(), 1.0);
            y.set(thread_id(), scratch.get(thread_id()));
        });
        let entry = KernelEntry::of("large", &large);
        assert_eq!((entry.metal, &*entry.cuda.architecture), (None, "sm_80"));
    }

    #[test]
    fn damage_is_named() {
        let json = Manifest::of([("scaled_rows", &sample())]).to_json();
        for (from, to, says) in [
            ("\"version\": 3", "\"version\": 9", "version"),
            ("\"threads\": 64", "\"threads\": \"x\"", "line"),
            ("ceil_div(rows, 2)", "ceil_div(rows,", "expected"),
            ("\"dtype\": \"f16\"", "\"dtype\": \"f17\"", "f17"),
        ] {
            assert!(json.contains(from), "{from}");
            let found = Manifest::parse(&json.replacen(from, to, 1))
                .and_then(|m| m.kernels[0].kernel().map_err(|f| f.to_string()));
            let error = found.expect_err(from);
            assert!(error.contains(says), "{error}");
        }
    }
}
