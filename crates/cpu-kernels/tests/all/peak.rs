use delft_cpu_kernels::matmul::*;

#[test]
fn every_set_has_peaks() {
    let rate = |isa, unit| peak(&Alone, isa, unit, 5);
    for &isa in Isa::available() {
        assert!(rate(isa, Unit::Bytes) > 1e6 && rate(isa, Unit::Floats) > 1e6, "{isa}");
        let tiles = isa.name() == "amx" || Blas::of_system().is_some();
        assert_eq!(rate(isa, Unit::Tiles) > 0.0, tiles, "{isa}");
        assert_eq!(rate(isa, Unit::Narrow) > 0.0, isa.name() == "avx2", "{isa}");
    }
    // Factors of ten and more, far from what neighbours do to the best of several; an emulator,
    // though, is as slow in wide registers as in narrow ones.
    #[cfg(target_arch = "x86_64")]
    if let [least, .., best] = *Isa::available() {
        assert!(rate(best, Unit::Bytes) > 2.0 * rate(least, Unit::Bytes), "{best}");
    }
}
