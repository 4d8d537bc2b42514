//! The driver on the fake: every test runs emitted Metal text, so each needs a C++ compiler and
//! says so without one.

use std::sync::Arc;

use formats::Result;
use sha2::{Digest, Sha256};
use tile::Kernel;
use tile::dsl::*;
use tile::emit::{self, Dialect};
use tile::launch::{Mode, Numbers, Requirement};
use tile::passes::{self, Target};

use super::api::{Api, Commands, Encoder, Function};
use super::driver::{Driver, MetalLaunch, Options};
use super::failure::Failure;
use super::fake::Fake;
use super::plan;
use crate::cache::Cache;
use crate::gpu::Backend;

/// `y = x * by + shift`, with the shift a constant.
fn line(name: &str) -> Kernel {
    build(name, || {
        let x = In::<f32>::declare("x");
        let by = Arg::<f32>::declare("by");
        let y = Out::<f32>::declare("y");
        let n = Arg::<u32>::declare("n");
        let shift = Const::<f32>::declare("shift");
        launch(Mode::Element, [dim("n").ceil_div(32u32), fixed(1), fixed(1)], 32);
        require(Requirement::Length("x".into(), dim("n") + 0u32));
        require(Requirement::Length("y".into(), dim("n") + 0u32));
        let i = group_id() * 32u32 + thread_id();
        test(i.lt(n)).then(|| y.set(i, x.get(i) * by + shift)).otherwise(|| {});
    })
}

fn special(kernel: &Kernel, shift: f32) -> Kernel {
    let kernel = passes::specialise(kernel, &Numbers::new().with_f32("shift", shift));
    passes::lower(&kernel, Target::Metal).unwrap()
}

fn driver() -> Driver<Fake> {
    Driver::new(Fake::new(), Options::default()).unwrap()
}

/// Whether texts can be run here.
fn compiler() -> bool {
    let found = driver().load(&Arc::new(special(&line("probe"), 0.0)));
    if let Err(why) = &found {
        assert!(why.expected.contains("compiler"), "{why}");
        testing::skipped(why);
    }
    found.is_ok()
}

type FakeBuffer = <Driver<Fake> as Backend>::Buffer;

fn floats(driver: &Driver<Fake>, buffer: &FakeBuffer, count: usize) -> Result<Vec<f32>> {
    let mut bytes = vec![0; 4 * count];
    driver.read(buffer, &mut bytes)?;
    Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

fn put(driver: &Driver<Fake>, buffer: &FakeBuffer, values: &[f32]) {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    driver.write(buffer, &bytes).unwrap();
}

const N: usize = 40;

/// `b = 2 a + 1`, `c = 3 b + 1`, `b = 5 c + 1`: each waits for the one before, for three different
/// reasons.
fn chain(driver: &Driver<Fake>, parts: &[FakeBuffer; 3]) -> Vec<MetalLaunch<Fake>> {
    let pipeline = driver.load(&Arc::new(special(&line("line"), 1.0))).unwrap();
    let numbers = |by| Numbers::new().with_f32("by", by).with("n", N as u32);
    let [a, b, c] = parts;
    [(2.0, a, b), (3.0, b, c), (5.0, c, b)]
        .map(|(by, x, y)| driver.bind(&pipeline, &numbers(by), &[x.clone(), y.clone()]).unwrap())
        .into()
}

/// Three parts of one buffer, and what `b` is after the chain.
fn parts(driver: &Driver<Fake>) -> ([FakeBuffer; 3], Vec<f32>) {
    let all = driver.buffer(1024).unwrap();
    let parts = [0, 256, 512].map(|at| driver.part(&all, at..at + 4 * N).unwrap());
    let a: Vec<f32> = (0..N).map(|i| i as f32).collect();
    put(driver, &parts[0], &a);
    (parts, a.iter().map(|a| 5.0 * (3.0 * (2.0 * a + 1.0) + 1.0) + 1.0).collect())
}

#[test]
fn launches_run_in_order_eagerly_and_recorded() {
    if !compiler() {
        return;
    }
    let driver = driver();
    let (parts, want) = parts(&driver);
    driver.submit(&chain(&driver, &parts)).unwrap();
    assert_eq!(floats(&driver, &parts[1], N).unwrap(), want);

    put(&driver, &parts[1], &[0.0; N]);
    let mut recording = driver.record(&chain(&driver, &parts)).unwrap();
    assert_eq!(floats(&driver, &parts[1], N).unwrap(), [0.0; N], "recording runs nothing");
    for _ in 0..2 {
        driver.replay(&mut recording).unwrap();
        assert_eq!(floats(&driver, &parts[1], N).unwrap(), want);
        put(&driver, &parts[1], &[0.0; N]);
    }
    // What was recorded sees new inputs, also when nothing is read in between.
    put(&driver, &parts[0], &[1.0; N]);
    driver.replay(&mut recording).unwrap();
    put(&driver, &parts[0], &[7.0; N]);
    assert_eq!(floats(&driver, &parts[1], N).unwrap(), [51.0; N]);
}

#[test]
fn long_work_is_cut_into_command_buffers_that_are_not() {
    if !compiler() {
        return;
    }
    let driver = driver();
    let (parts, want) = parts(&driver);
    let launches = chain(&driver, &parts);
    let mut recording = driver.record(&launches).unwrap();
    // So slow that each launch is a command buffer of its own, from the second step on.
    driver.api().dispatches_take(1.0);
    for _ in 0..2 {
        driver.submit(&launches).unwrap();
        assert_eq!(floats(&driver, &parts[1], N).unwrap(), want);
        driver.replay(&mut recording).unwrap();
        assert_eq!(floats(&driver, &parts[1], N).unwrap(), want);
    }
    assert_eq!(driver.api().dispatches_take(1.0), 3, "nothing is known of the first");
    driver.submit(&launches).unwrap();
    driver.replay(&mut recording).unwrap();
    assert_eq!(driver.api().waiting(), 6);
    assert_eq!(floats(&driver, &parts[1], N).unwrap(), want);
    assert_eq!(driver.api().dispatches_take(0.0), 1);
}

#[test]
fn an_offset_that_indirect_commands_cannot_hold_is_refused() {
    // A part of a buffer that is that long would have to be there: its range is made up.
    let error = plan::offset(&((1_usize << 32)..(1 << 32) + 4)).unwrap_err().to_string();
    assert!(error.contains("below 4 GiB") && error.contains("4294967296"), "{error}");
    assert!(plan::offset(&(0..4)).is_ok() && plan::offset(&((1 << 32) - 4..1 << 32)).is_ok());
}

#[test]
fn a_recording_keeps_what_it_refers_to() {
    if !compiler() {
        return;
    }
    let driver = driver();
    let result = driver.buffer(4 * N).unwrap();
    let mut recording = {
        let source = driver.buffer(4 * N).unwrap();
        put(&driver, &source, &[3.0; N]);
        let pipeline = driver.load(&Arc::new(special(&line("line"), 1.0))).unwrap();
        let numbers = Numbers::new().with_f32("by", 2.0).with("n", N as u32);
        let launch = driver.bind(&pipeline, &numbers, &[source, result.clone()]).unwrap();
        driver.record(&[launch]).unwrap()
    };
    driver.replay(&mut recording).unwrap();
    // Dropped while it is in flight: dropping waits.
    drop(recording);
    assert_eq!(floats(&driver, &result, N).unwrap(), [7.0; N]);
}

#[test]
fn buffers_are_zeros_and_lend_parts() {
    let driver = driver();
    let whole = driver.buffer(64).unwrap();
    assert_eq!(floats(&driver, &whole, 16).unwrap(), [0.0; 16]);
    let part = driver.part(&driver.part(&whole, 16..64).unwrap(), 8..16).unwrap();
    put(&driver, &part, &[1.0, 2.0]);
    assert_eq!(floats(&driver, &whole, 8).unwrap()[6..], [1.0, 2.0]);
    let other = driver.buffer(3 << 20).unwrap();
    let large = driver.buffer(3 << 20).unwrap();
    driver.write(&driver.part(&other, (2 << 20)..(3 << 20)).unwrap(), &[9; 1 << 20]).unwrap();
    driver.copy(&other, &large).unwrap();
    let mut end = [0; 2];
    driver.read(&driver.part(&large, (3 << 20) - 2..3 << 20).unwrap(), &mut end).unwrap();
    assert_eq!(end, [9; 2]);
    for wrong in [
        driver.part(&part, 0..9).map(drop),
        driver.write(&part, &[0; 9]),
        driver.read(&part, &mut [0; 9]),
        driver.copy(&whole, &part),
        driver.buffer(1 << 40).map(drop),
    ] {
        let why = wrong.unwrap_err().to_string();
        assert!(why.starts_with("metal") && why.contains("at most"), "{why}");
    }
}

#[test]
fn reading_is_timed() {
    if compiler() {
        assert!(driver().read_rate() > 0.0);
    }
}

#[test]
fn an_empty_step_and_an_empty_recording() {
    let driver = driver();
    driver.submit(&[]).unwrap();
    assert!(driver.record(&[]).is_err());
}

#[test]
fn failures_are_told_once_and_a_lost_gpu_always() {
    let driver = driver();
    let buffer = driver.buffer(8).unwrap();
    driver.api().fail(Failure { code: 8, said: "Insufficient Memory".to_owned() });
    let why = driver.write(&buffer, &[1; 8]).unwrap_err().to_string();
    assert!(why.contains("too little memory"), "{why}");
    driver.write(&buffer, &[1; 8]).unwrap();

    driver.api().fail(Failure { code: 11, said: "Device Removed".to_owned() });
    for _ in 0..2 {
        let why = driver.read(&buffer, &mut [0; 8]).unwrap_err().to_string();
        assert!(why.contains("removed") && why.contains("hint"), "{why}");
    }
}

#[test]
fn a_kernel_that_fails_is_named_when_it_is_waited_for() {
    if !compiler() {
        return;
    }
    let driver = driver();
    // The contract forgets the length of x, so that the launch is accepted.
    let kernel = build("leaves", || {
        let x = In::<f32>::declare("x");
        let y = Out::<f32>::declare("y");
        launch(Mode::Element, [fixed(1), fixed(1), fixed(1)], 32);
        y.set(thread_id(), x.get(thread_id() + 100_000u32));
    });
    let pipeline = driver.load(&Arc::new(passes::lower(&kernel, Target::Metal).unwrap())).unwrap();
    let [x, y] = [4, 128].map(|bytes| driver.buffer(bytes).unwrap());
    driver.submit(&[driver.bind(&pipeline, &Numbers::new(), &[x, y.clone()]).unwrap()]).unwrap();
    let why = driver.read(&y, &mut [0; 4]).unwrap_err().to_string();
    assert!(why.contains("leaves"), "{why}");
}

/// A folder with a library of one kernel, as `tile build` makes it, but that the fake's metallib is
/// the text.
fn library(kernel: &Kernel) -> (tempfile::TempDir, Options) {
    let folder = tempfile::tempdir().unwrap();
    let lowered = passes::lower(kernel, Target::Metal).unwrap();
    let text = emit::text(&[lowered], Dialect::Metal).unwrap();
    let path = folder.path().join(super::library::NAME);
    std::fs::write(&path, &text).unwrap();
    let hex: String = Sha256::digest(&text).iter().map(|b| format!("{b:02x}")).collect();
    let list = format!("{hex}  {}.metal\n", kernel.name);
    std::fs::write(path.with_added_extension("sha256"), list).unwrap();
    (folder, Options { library: Some((path, true)), ..Options::default() })
}

#[test]
fn a_library_gives_kernels_with_their_constants() {
    if !compiler() {
        return;
    }
    let kernel = line("line");
    let (_folder, options) = library(&kernel);
    let driver = Driver::new(Fake::new(), options).unwrap();
    let [x, y] = [0; 2].map(|_| driver.buffer(4 * N).unwrap());
    put(&driver, &x, &[2.0; N]);
    for (shift, want) in [(1.0, 7.0), (-4.0, 2.0), (1.0, 7.0)] {
        let numbers =
            Numbers::new().with_f32("shift", shift).with_f32("by", 3.0).with("n", N as u32);
        let pipeline = driver.built(&kernel, &numbers).unwrap();
        let launch = driver.bind(&pipeline, &numbers, &[x.clone(), y.clone()]).unwrap();
        driver.submit(&[launch]).unwrap();
        assert_eq!(floats(&driver, &y, N).unwrap(), [want; N]);
    }
    assert_eq!(driver.api().compiled(), 2);
    assert!(driver.built(&kernel, &Numbers::new()).is_none(), "no value for the constant");
    assert!(driver.built(&line("other"), &Numbers::new()).is_none(), "not in the library");
}

#[test]
fn a_library_of_another_version_is_not_used() {
    if !compiler() {
        return;
    }
    let numbers = Numbers::new().with_f32("shift", 1.0);
    let other = build("line", || {
        let y = Out::<f32>::declare("y");
        let shift = Const::<f32>::declare("shift");
        launch(Mode::Element, [fixed(1), fixed(1), fixed(1)], 32);
        y.set(thread_id(), shift);
    });
    let (_folder, options) = library(&other);
    let driver = Driver::new(Fake::new(), options).unwrap();
    assert!(driver.built(&other, &numbers).is_some());
    assert!(driver.built(&line("line"), &numbers).is_none());
}

#[test]
fn a_named_library_must_be_whole_and_one_beside_the_program_need_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("none.metallib");
    let open = |must| {
        let library = Some((path.clone(), must));
        Driver::new(Fake::new(), Options { library, ..Options::default() })
    };
    let why = open(true).map(drop).unwrap_err().to_string();
    assert!(why.contains("none.metallib.sha256"), "{why}");
    open(false).unwrap();
    std::fs::write(path.with_added_extension("sha256"), "what\n").unwrap();
    let why = open(true).map(drop).unwrap_err().to_string();
    assert!(why.contains("sha256sum") && why.contains("tile build"), "{why}");
}

#[test]
fn pipelines_are_kept_from_run_to_run() {
    if !compiler() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let kernels = [1.0, 2.0, 3.0].map(|shift| {
        let name = format!("line{shift}").replace('.', "_");
        Arc::new(special(&line(&name), shift))
    });
    let run = |count: usize| {
        let options = Options { cache: Some(Cache::at(folder.path())), ..Options::default() };
        let driver = Driver::new(Fake::new(), options).unwrap();
        let chosen = &kernels[..count];
        driver.ahead(&chosen.iter().map(|kernel| &**kernel).collect::<Vec<_>>());
        chosen.iter().for_each(|kernel| drop(driver.load(kernel).unwrap()));
        // Again: from memory.
        chosen.iter().for_each(|kernel| drop(driver.load(kernel).unwrap()));
        driver.api().compiled()
    };
    assert_eq!([run(2), run(2), run(3), run(3)], [2, 0, 1, 0]);
    let files = || std::fs::read_dir(folder.path()).unwrap().map(|f| f.unwrap().path());
    assert_eq!(files().count(), 1, "one archive, and nothing left aside");
    let file = files().next().unwrap();
    let whole = std::fs::read(&file).unwrap();
    for damaged in [whole[..whole.len() / 2].to_vec(), vec![], b"other bytes".to_vec()] {
        std::fs::write(&file, damaged).unwrap();
        assert_eq!([run(3), run(3)], [3, 0], "damage costs compiling");
    }
    // Whole, but not what Metal takes for an archive.
    let other = Cache::at(folder.path());
    let key = crate::cache::key(&["metal pipelines", "Metal text on this CPU", "none"]);
    other.put(&key, b"something else");
    assert_eq!([run(3), run(3)], [3, 0]);
}

#[test]
fn the_places_of_metal_are_named() {
    use crate::{DeviceSpec, Simulator};
    for (name, place) in
        [("metal", DeviceSpec::Metal), ("sim-metal", DeviceSpec::Sim(Simulator::Metal))]
    {
        assert_eq!(
            (name.parse::<DeviceSpec>().unwrap(), place.to_string()),
            (place, name.to_owned())
        );
    }
    assert_eq!(DeviceSpec::Sim(Simulator::Metal).open(None).unwrap().about().name, "metal");
    #[cfg(not(target_vendor = "apple"))]
    {
        let why = DeviceSpec::Metal.open(None).map(drop).unwrap_err().to_string();
        assert!(why.starts_with("metal: expected macOS") && why.contains("device cpu"), "{why}");
    }
}

/// Mistakes of a careless driver: each case leaves out one thing, and says what comes of it.
#[test]
fn the_fake_finds_what_a_driver_forgets() {
    if !compiler() {
        return;
    }
    let kernel = special(&line("line"), 1.0);
    let text = emit::text(std::slice::from_ref(&kernel), Dialect::Metal).unwrap();
    let run = |forgotten: &str| -> std::result::Result<f32, String> {
        let api = Fake::new();
        let library = api.compile(&text, (3, 1)).unwrap();
        let function = Function { kernel: &kernel, constants: vec![] };
        let (pipeline, _) = api.pipeline(&library, &function, None).unwrap();
        let memory = [0; 3].map(|_| api.memory(4 * N).unwrap());
        for memory in memory.iter().filter(|_| forgotten != "resident") {
            api.reside(memory);
        }
        let numbers = api.memory(512).unwrap();
        api.reside(&numbers);
        api.write(&numbers, 0, &2.0_f32.to_le_bytes()).unwrap();
        api.write(&numbers, 256, &(N as u32).to_le_bytes()).unwrap();
        let indirect = api.indirect(2, 4).unwrap();
        for (i, (x, y)) in [(0, 1), (1, 2)].into_iter().enumerate() {
            let mut slot = api.slot(&indirect, i);
            if i == 1 && forgotten != "a barrier" {
                slot.barrier();
            }
            if forgotten != "the pipeline" {
                slot.pipeline(&pipeline);
            }
            slot.buffer(0, &memory[x], 0..4 * N);
            slot.buffer(1, &numbers, 0..4);
            if forgotten != "a binding" {
                slot.buffer(2, &memory[y], 0..4 * N);
            }
            slot.buffer(if forgotten == "the limit" { 4 } else { 3 }, &numbers, 256..260);
            slot.dispatch([2, 1, 1], 32);
        }
        let kept = (forgotten != "to keep memory").then_some(numbers);
        let mut encoder = api.encoder().unwrap();
        if forgotten != "to name pipelines" {
            encoder.touch(&pipeline);
        }
        encoder.execute(&indirect, 0..2);
        encoder.commit().unwrap();
        while forgotten != "to wait" && api.advance().is_some() {}
        drop(kept);
        let mut found = [0; 4];
        api.read(&memory[2], 0, &mut found).map_err(|e| e.to_string())?;
        match api.failure() {
            Some(failure) => Err(failure.said),
            None => Ok(f32::from_le_bytes(found)),
        }
    };
    assert_eq!(run("nothing"), Ok(3.0));
    assert_eq!(run("a barrier"), Ok(1.0), "the second launch read what the first had not written");
    for (forgotten, says) in [
        ("the pipeline", "without a pipeline"),
        ("a binding", "nothing fit for `y` at 2"),
        ("the limit", "binding 4 of 4"),
        ("to keep memory", "is gone"),
        ("resident", "not resident"),
        ("to name pipelines", "not named"),
        ("to wait", "in flight"),
    ] {
        let why = run(forgotten).expect_err(forgotten);
        assert!(why.contains(says), "{forgotten}: {why}");
    }
    // A text that needs 3.2, one that asks for it without need, and one that makes an atomic of
    // what is coherent.
    let coherent = text.replace("device float*", "TK_COHERENT device float*");
    let cast = format!("{coherent}// atomic_fetch_add_explicit((device atomic_uint*)(y + 1u), 1u)");
    let refused = |text: &str, version| Fake::new().compile(text, version).map(drop).unwrap_err();
    for (text, version, says) in [
        (&coherent, (3, 1), "coherent: true"),
        (&text, (3, 2), "coherent: false"),
        (&cast, (3, 2), "drops what makes it coherent"),
    ] {
        let why = refused(text, version).to_string();
        assert!(why.contains(says), "{why}");
    }
}

#[test]
fn notes_are_waited_for_one_step_at_a_time() {
    if !compiler() {
        return;
    }
    let driver = driver();
    let pinned = driver.pinned(128).unwrap();
    let pipeline = driver.load(&Arc::new(special(&line("line"), 1.0))).unwrap();
    let numbers = Numbers::new().with_f32("by", 0.0).with("n", 2);
    let x = driver.buffer(8).unwrap();
    let launch = |at| {
        let to = driver.part(&pinned, at..at + 8).unwrap();
        driver.bind(&pipeline, &numbers, &[x.clone(), to]).unwrap()
    };
    let why = {
        driver.write_pinned(&pinned, 0, &[0xFF; 4]).unwrap();
        driver.read_pinned(&pinned, 0).unwrap_err().to_string()
    };
    assert!(why.contains("pinned"), "{why}");
    for word in [0, 2] {
        driver.write_pinned(&pinned, word, &[0xFF; 4]).unwrap();
        driver.submit(&[launch(4 * word)]).unwrap();
    }
    let one = 1.0_f32.to_bits();
    assert_eq!(driver.read_pinned(&pinned, 0).unwrap(), Some([one; 2]));
    assert_eq!(driver.api().waiting(), 1, "the second step is still under way");
    driver.write_pinned(&pinned, 0, &[0xFF; 4]).unwrap();
    assert_eq!(driver.read_pinned(&pinned, 2).unwrap(), Some([one; 2]));
    assert!(driver.read_pinned(&pinned, 0).is_err() && driver.read_pinned(&pinned, 127).is_err());
}
