//! Weights that are not finite are refused where they are read, by their names in the file.

use formats::{Error, Hint, NotFinite, Setting, Tensor, Tensors};
use program::{Axis, Weight};

/// The error for a weight of which `found` is not finite.
pub(crate) fn refusal(
    weight: &Weight,
    tensors: &Tensors,
    tensor: &Tensor<'_>,
    found: NotFinite,
) -> Error {
    let file = tensors.file(tensor).unwrap_or(tensors.path());
    let place = format!("{}: {}", file.display(), tensor.name);
    let found = format!("{found} in {}", position(weight, found));
    let error = Error::new(place, "finite weights", found);
    let hint = Hint::text("download the file again, or convert it anew; ");
    error.hint(hint.with(Setting::AllowNan).and(" loads it as it is"))
}

/// Where in its tensor it is, which a weight may be a part of.
fn position(weight: &Weight, found: NotFinite) -> String {
    let &[rows, cols] = weight.shape.as_slice() else {
        return format!("element {}", found.element);
    };
    let cols = cols.max(1);
    let (mut row, mut column) = (found.element / cols, found.element % cols);
    match weight.slice {
        Some(slice) if slice.axis == Axis::Rows => row += slice.index * rows,
        Some(slice) => column += slice.index * cols,
        None => {}
    }
    match found.shared {
        1 => format!("row {row}, column {column}"),
        shared => format!("row {row}, columns {column} to {}", column + shared - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use program::Slice;

    #[test]
    fn a_position_is_that_in_the_tensor() {
        let slice = |axis, index| Some(Slice { axis, index, of: 4 });
        for (shape, slice, element, shared, expected) in [
            (vec![8, 64], None, 0, 1, "row 0, column 0"),
            (vec![8, 64], None, 130, 1, "row 2, column 2"),
            (vec![8, 64], None, 96, 32, "row 1, columns 32 to 63"),
            (vec![8, 64], slice(Axis::Rows, 3), 96, 32, "row 25, columns 32 to 63"),
            (vec![8, 64], slice(Axis::Columns, 2), 66, 1, "row 1, column 130"),
            (vec![64], None, 7, 1, "element 7"),
        ] {
            let weight = Weight { name: "w".into(), stored: "w".into(), shape, slice };
            let value = f32::NAN;
            assert_eq!(position(&weight, NotFinite { element, shared, value }), expected);
        }
    }
}
