//! The interpreter runs kernels as the language says.

extern crate delft_tile as tile;

use tile::case::{Buffer, noise};
use tile::dsl::*;
use tile::interp::{self, Machine};
use tile::launch::{Mode, Numbers};
use tile::types::Scalar;

#[kernel]
fn rms_norm<T: Float>(x: In<T>, y: Out<T>, width: Const<u32>, eps: Const<f32>, group: u32) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], group);
    let row = group_id() * width;
    let mut sum = Var::new(0.0);
    for i in strided(width) {
        let v = x[row + i].f32();
        sum += v * v;
    }
    let scale = (group_sum(sum.get()) / width.f32() + eps).rsqrt();
    for i in strided(width) {
        y[row + i] = (x[row + i].f32() * scale).cast();
    }
}

#[test]
fn a_reduction_over_rows() {
    for (rows, width, group) in [(3, 129, 64), (1, 7, 32), (2, 1024, 256)] {
        let x = noise(1, rows * width);
        let mut buffers = [Buffer::floats(Scalar::F32, &x), Buffer::zeros(Scalar::F32, x.len())];
        let numbers = Numbers::new().with("width", width as u32).with("rows", rows as u32);
        let numbers = numbers.with_f32("eps", 1e-5);
        interp::run(&rms_norm::<f32>(group), &numbers, &mut buffers).unwrap();
        let want: Vec<f64> = x
            .chunks(width)
            .flat_map(|row| {
                let squares: f64 = row.iter().map(|v| f64::from(*v).powi(2)).sum();
                let scale = 1.0 / (squares / width as f64 + 1e-5).sqrt();
                row.iter().map(move |v| f64::from(*v) * scale)
            })
            .collect();
        assert!(tile::case::error(&buffers[1].to_f64(), &want) < 1e-6);
    }
}

/// Not a test of correctness: prints lane instructions per second. `cargo test -- --ignored --nocapture speed`.
#[test]
#[ignore = "a measurement"]
fn speed() {
    let machine = Machine::new(&rms_norm::<f32>(256)).unwrap();
    let (rows, width) = (64, 4096);
    let x = noise(1, rows * width);
    let mut buffers = [Buffer::floats(Scalar::F32, &x), Buffer::zeros(Scalar::F32, x.len())];
    let numbers = Numbers::new().with("width", width as u32).with("rows", rows as u32);
    let numbers = numbers.with_f32("eps", 1e-5);
    for _ in 0..3 {
        let start = std::time::Instant::now();
        let stats = machine.run(&numbers, &mut buffers).unwrap();
        let seconds = start.elapsed().as_secs_f64();
        let rate = stats.instructions as f64 / seconds / 1e6;
        println!("{stats:?} in {seconds:.4} s: {rate:.0} M lane instructions per second");
    }
}
