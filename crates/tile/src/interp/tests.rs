//! Faults that the verifier already refuses are found by the interpreter too: two opinions on the
//! same rules.

use super::CompiledKernel;
use crate::case::Buffer;
use crate::launch::Numbers;
use crate::text;
use crate::types::Scalar;

/// Runs a body over 64 threads with `x` (u32, the numbers 0..256) and `y` (u32), unverified.
fn run(body: &str) -> Result<(), String> {
    let text = format!(
        "kernel test {{\n mode element\n grid 1, 1, 1\n threads 64\n buffer x: u32 in\n buffer y: u32 out\n \
         shared s: u32[256]\n register r: u32[4]\n body {{\n{body}\n }}\n}}\n"
    );
    let kernel = text::parse(&text).map_err(|fault| fault.to_string())?;
    let x: Vec<u32> = (0..256).collect();
    let mut buffers = [Buffer::words(&x), Buffer::zeros(Scalar::U32, 256)];
    let machine = CompiledKernel::compiled(&kernel).map_err(|fault| fault.to_string())?;
    let ran = machine.run(&Numbers::new(), &mut buffers);
    ran.map(|_| ()).map_err(|fault| fault.to_string())
}

const FEW: &str = "%0: u32 = thread\n%1: u32 = 40\n%2: bool = lt %0, %1\n";
const SOME: &str = "%0: u32 = thread\n%1: u32 = 3\n%2: bool = ne %0, %1\n";

#[test]
fn divergence_is_found_on_the_way() {
    for (head, inner, what) in [
        (
            FEW,
            "barrier",
            "barrier: thread 40 of group (0, 0, 0) does not take part, and the whole threadgroup",
        ),
        (SOME, "barrier", "barrier: thread 3 of group"),
        (
            FEW,
            "simd_barrier",
            "simdgroup barrier: thread 40 of group (0, 0, 0) does not take part, and the whole simd",
        ),
        (SOME, "%3: u32 = simd_sum %0", "simdgroup operation: thread 3"),
        (FEW, "%3: tile<u32, 16x16, c> = splat %1", "tile operation: thread 40"),
    ] {
        let inside = run(&format!("{head}if %2 {{\n{inner}\n}} else {{\n}}"));
        let said = inside.expect_err(inner);
        assert!(said.contains(what), "{inner}: {said}");
        assert_eq!(run(&format!("{head}{inner}")), Ok(()), "{inner} outside the branch");
    }
}

#[test]
fn tiles_want_the_same_address_in_all_lanes() {
    let said = run("%0: u32 = thread\n%1: tile<u32, 16x16, c> = splat %0").unwrap_err();
    assert!(said.contains("thread 1 of group (0, 0, 0): a tile's value"), "{said}");
}

#[test]
fn what_cannot_be_compiled_is_a_fault() {
    for (body, what) in [
        ("%1: u32 = add %0, %0\n%0: u32 = 1", "%0"),
        ("%0: u32 = 1\n%1: f32 = 0x0\n%2: u32 = add %0, %1", "add"),
        ("%0: u32 = 1\nstore x[%0] = %0", "input"),
        ("%0: u32 = thread\n%1: u32 = 0\nfor %2: u32 = %1 to %0 step %1 {\n}", "step 0"),
    ] {
        let said = run(body).expect_err(body);
        assert!(said.contains(what), "{body}: {said}");
    }
}
