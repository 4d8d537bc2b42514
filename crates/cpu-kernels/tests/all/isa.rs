use delft_cpu_kernels::isa::*;

#[test]
fn every_set_parses_back_and_unknown_names_are_told_apart() {
    for &isa in Isa::available() {
        assert_eq!(Isa::parse(isa.name()), Ok(isa));
    }
    assert!(Isa::available().windows(2).all(|pair| pair[0] < pair[1]));
    let error = Isa::parse("sse9").unwrap_err();
    assert!(error.found.contains("sse9"), "{error}");
}

/// `xtask/neon.sh` names a set with each emulated processor: one that lacks it fails here instead
/// of testing less.
#[test]
fn the_set_asked_for_is_the_one_in_use() {
    let best = *Isa::available().last().unwrap();
    let wanted = std::env::var(VARIABLE).unwrap_or(best.to_string());
    assert_eq!(Isa::detect().map(Isa::name), Ok(wanted.as_str()));
}
