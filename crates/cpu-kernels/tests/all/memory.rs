use delft_cpu_kernels::matmul::Huge;

#[test]
fn huge_buffers_are_aligned_zeroed_and_may_be_empty() {
    let mut buffer = Huge::zeroed(5_000_001).unwrap();
    assert_eq!(buffer.as_ptr() as usize % Huge::PAGE, 0);
    assert!(buffer.iter().all(|&b| b == 0));
    buffer[5_000_000] = 7;
    assert_eq!((buffer.len(), buffer[5_000_000]), (5_000_001, 7));
    assert!(Huge::zeroed(0).unwrap().is_empty());
    assert!(Huge::zeroed(usize::MAX).is_err());
}
