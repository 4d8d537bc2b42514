//! The kernel language from outside, as one test program.

extern crate delft_tile as tile;

mod cuda_compile;
mod emit;
mod filetests;
mod interp;
#[path = "../shim/inventory.rs"]
mod inventory;
mod language;
mod mutants;
mod passes;
mod proof;
mod seeded;
mod swift;
