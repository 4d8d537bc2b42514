//! The manifest of a build: per kernel all that a launch needs to know, as JSON.
//!
//! [`Entry::kernel`] turns an entry back into a kernel without a body, whose [`Kernel::bind`] checks a launch and gives the
//! grid: whoever holds the manifest and the built text needs nothing else. Sizes are written as in the text form
//! (`ceil_div(rows * width, 256)`), over constants, `u32` arguments and the free `dimensions`.

use serde::{Deserialize, Serialize};

use crate::emit;
use crate::ir::{Access, Kernel, ParamKind};
use crate::text;
use crate::types::Scalar;
use crate::verify::Fault;

/// The version of the format, raised when a reader of the old one would be misled.
pub const VERSION: u32 = 1;

/// Every kernel of a build.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`VERSION`].
    pub version: u32,
    /// In the order they were built.
    pub kernels: Vec<Entry>,
}

/// One kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Its name: the Metal function, and the CUDA symbol or template.
    pub name: String,
    /// What a threadgroup computes: `element`, `row`, `vector` or `tile`.
    pub mode: String,
    /// Buffers and arguments in binding order: Metal's buffer index, CUDA's parameter index.
    pub params: Vec<Param>,
    /// Specialisation constants.
    pub constants: Vec<Constant>,
    /// Names in `grid` and `requires` that neither constants nor arguments give.
    pub dimensions: Vec<String>,
    /// Threadgroups along each axis.
    pub grid: [String; 3],
    /// Threads of a threadgroup.
    pub threads: u32,
    /// What must hold at bind time.
    pub requires: Vec<String>,
    /// Bytes of threadgroup memory, declared by the text itself on Metal.
    pub shared_bytes: u32,
    /// Bytes of dynamic shared memory that a CUDA launch has to ask for.
    pub cuda_dynamic_shared_bytes: u32,
}

/// A buffer or a scalar argument.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Param {
    /// Its name.
    pub name: String,
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
pub struct Constant {
    /// Its name.
    pub name: String,
    /// Its type.
    pub dtype: String,
    /// The name of its Metal function constant.
    pub metal: String,
}

impl Manifest {
    /// Of these kernels.
    pub fn of(kernels: &[Kernel]) -> Manifest {
        Manifest { version: VERSION, kernels: kernels.iter().map(Entry::of).collect() }
    }

    /// As JSON.
    pub fn to_json(&self) -> String {
        // Strings and numbers only: nothing that could fail to be written.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// Of JSON.
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
    pub fn get(&self, name: &str) -> Option<&Entry> {
        self.kernels.iter().find(|entry| entry.name == name)
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

impl Entry {
    /// Of a kernel.
    pub fn of(kernel: &Kernel) -> Entry {
        let param = |p: &crate::ir::Param| {
            let (kind, scalar, access) = match p.kind {
                ParamKind::Buffer { scalar, access } => {
                    ("buffer", scalar, Some(access_name(access).to_owned()))
                }
                ParamKind::Argument(scalar) => ("argument", scalar, None),
            };
            Param { name: p.name.clone(), kind: kind.to_owned(), dtype: scalar.to_string(), access }
        };
        let constant = |c: &crate::ir::Constant| Constant {
            name: c.name.clone(),
            dtype: c.scalar.to_string(),
            metal: emit::metal_constant(kernel, &c.name),
        };
        Entry {
            name: kernel.name.clone(),
            mode: kernel.launch.mode.name().to_owned(),
            params: kernel.params.iter().map(param).collect(),
            constants: kernel.constants.iter().map(constant).collect(),
            dimensions: kernel.dimensions().into_iter().map(str::to_owned).collect(),
            grid: kernel.launch.grid.clone().map(|extent| extent.to_string()),
            threads: kernel.launch.threads,
            requires: kernel.launch.requirements.iter().map(ToString::to_string).collect(),
            shared_bytes: kernel.shared_bytes(),
            cuda_dynamic_shared_bytes: emit::cuda_dynamic_shared(kernel),
        }
    }

    /// The kernel without its body: parameters, constants and contract. Its shared memory is one array of the right size.
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
    use crate::launch::{Bound, Mode, Numbers, Requirement};

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
        let json = Manifest::of(std::slice::from_ref(&kernel)).to_json();
        let read = Manifest::parse(&json).unwrap();
        let entry = read.get("scaled_rows_f16").unwrap();
        assert_eq!(entry.dimensions, ["rows"]);
        let shell = entry.kernel().unwrap();
        assert_eq!(shell.launch, kernel.launch);
        assert_eq!((&shell.params, &shell.constants), (&kernel.params, &kernel.constants));
        assert_eq!(shell.shared_bytes(), kernel.shared_bytes());
        let numbers = Numbers::new().with("rows", 5).with("width", 16).with_f32("by", 2.0);
        let buffers = [Bound { len: 96, align: 256 }, Bound { len: 80, align: 256 }];
        assert_eq!(shell.bind(&numbers, &buffers).unwrap(), [3, 1, 1]);
        assert!(shell.bind(&numbers.clone().with("width", 12), &buffers).is_err());
        let short = [Bound { len: 95, align: 256 }, buffers[1]];
        assert!(shell.bind(&numbers, &short).is_err());
    }

    #[test]
    fn damage_is_named() {
        let json = Manifest::of(&[sample()]).to_json();
        for (from, to, says) in [
            ("\"version\": 1", "\"version\": 9", "version"),
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
