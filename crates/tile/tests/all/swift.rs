//! Swift: what `tile build` writes compiles as Swift 6, and its launches are what [`tile::launch`]
//! says they are. Skipped without `swiftc` on `PATH`. There is no Metal here, so
//! `tests/swift/Metal.swift` stands for it.

use std::path::Path;
use std::process::Command;

use tile::dsl::*;
use tile::emit;
use tile::ir::Kernel;
use tile::launch::{BoundBuffer, Mode, Numbers, Requirement};
use tile::manifest::Manifest;
use tile::types::Scalar;
use tile::wrappers;

/// A kernel with everything that a contract can say.
fn scaled_rows() -> Kernel {
    build("scaled_rows_f16", || {
        let x = <In>::stored("x", Scalar::F16);
        let y = <Out>::stored("y", Scalar::F16);
        let by = Arg::<f32>::declare("by");
        let width = Const::<u32>::declare("width");
        launch(Mode::Row, [dim("rows").ceil_div(2u32), fixed(1), fixed(1)], 64);
        require(Requirement::Divisible(dim("width"), 8));
        require(Requirement::Length("x".into(), (dim("rows") + 1u32) * dim("width")));
        require(Requirement::Aligned("y".into(), 16));
        strided(width).each(|i| y.set(i, x.get(i) * by));
    })
}

/// One that Metal has no room for.
fn large() -> Kernel {
    build("large", || {
        let y = Out::<f32>::declare("y");
        launch(Mode::Row, [fixed(1), fixed(1), fixed(1)], 32);
        let scratch = Shared::<f32>::new(emit::METAL_SHARED);
        scratch.set(thread_id(), 1.0);
        y.set(thread_id(), scratch.get(thread_id()));
    })
}

/// A kernel that is recorded with a function and a schedule.
#[kernel]
fn picked(y: Out<f32>, f: &str, schedule: u32) {
    launch(Mode::Element, [fixed(1), fixed(1), fixed(1)], 32);
    y.set(thread_id(), f.len() as f32 + schedule as f32);
}

/// What `main.swift` expects is what binding in Rust gives.
#[test]
fn the_launch_that_swift_is_held_to_is_that_of_rust() {
    let numbers = Numbers::new().with("rows", 5).with("width", 16).with_f32("by", 2.0);
    let buffers = [BoundBuffer { len: 96, align: 256 }, BoundBuffer { len: 384, align: 256 }];
    assert_eq!(scaled_rows().bind(&numbers, &buffers).unwrap(), [3, 1, 1]);
}

#[test]
fn swift_launches_by_the_manifest() {
    if !Command::new("swiftc").arg("--version").output().is_ok_and(|o| o.status.success()) {
        return testing::skipped("Swift is not compiled: there is no swiftc on PATH");
    }
    let recorded = [("gelu", 1), ("silu", 1), ("silu", 2)].map(|(f, s)| picked(f, s).record());
    let [gelu, silu, mut fast] = recorded;
    fast.name = "picked_silu_fast".to_owned();
    let gelu = Kernel { name: "picked_gelu".to_owned(), ..gelu };
    let kernels = [scaled_rows(), large(), gelu, silu, fast];
    let folder = tempfile::tempdir().unwrap();
    let put = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    put("Launch.swift", wrappers::swift_runtime());
    put("Kernels.swift", &wrappers::swift(&kernels));
    let family = |kernel: &Kernel| {
        let picked = kernel.name.starts_with("picked").then_some("picked");
        picked.map_or_else(|| kernel.name.trim_end_matches("_f16").to_owned(), str::to_owned)
    };
    let families: Vec<String> = kernels.iter().map(family).collect();
    let mut manifest = Manifest::of(families.iter().map(String::as_str).zip(&kernels));
    for entry in manifest.kernels.iter_mut().filter(|entry| entry.name == "picked_silu_fast") {
        entry.metal.as_mut().unwrap().preferred = true;
    }
    put("manifest.json", &manifest.to_json());
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/swift");
    for name in ["Metal.swift", "main.swift"] {
        std::fs::copy(here.join(name), folder.path().join(name)).unwrap();
    }
    let run = |program: &str, arguments: &[&str]| {
        let done = Command::new(program).args(arguments).current_dir(folder.path()).output();
        let done = done.unwrap_or_else(|e| panic!("{program}: {e}"));
        let said = [done.stdout, done.stderr].map(|s| String::from_utf8_lossy(&s).into_owned());
        assert!(done.status.success(), "{program} {arguments:?}:\n{}", said.concat());
        said.concat()
    };
    let module = "-emit-library -emit-module -module-name Metal -parse-as-library Metal.swift";
    run("swiftc", &module.split(' ').collect::<Vec<_>>());
    let flags = "-swift-version 6 -warnings-as-errors -I . -L . -lMetal -Xlinker -rpath -Xlinker .";
    let sources = ["-o", "launches", "main.swift", "Launch.swift", "Kernels.swift"];
    run("swiftc", &flags.split(' ').chain(sources).collect::<Vec<_>>());
    assert_eq!(run("./launches", &["manifest.json"]), "as expected\n");
}
