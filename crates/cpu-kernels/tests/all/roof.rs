use delft_cpu_kernels::roof::*;

#[test]
fn every_byte_is_read() {
    for len in [0, 1, 127, 128, 511, 512, 5000] {
        for at in 0..len {
            let mut bytes = vec![0; len];
            bytes[at] = 1;
            assert_ne!(read(&bytes), 0, "byte {at} of {len}");
        }
    }
}
