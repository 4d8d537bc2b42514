//! Tests of the kernels through their public interface: a library of kernels takes minutes to
//! compile, and tests inside it would compile it a second time.

mod attention;
mod blas;
mod isa;
mod low_rank;
mod math;
mod matmul;
mod memory;
mod peak;
mod roof;
mod team;
mod topology;
