//! Prints the Program that a model's forward pass records, after fusion, for each file or folder
//! named.

extern crate delft_models as models;

fn main() -> Result<(), formats::Error> {
    for path in std::env::args_os().skip(1) {
        let tensors = formats::Tensors::open(&path)?;
        let program =
            program::fuse(&models::load(&tensors, &models::ReadOptions::default())?.record(false)?);
        println!("{}", path.display());
        print!("{program}");
    }
    Ok(())
}
