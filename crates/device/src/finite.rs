//! Refuses weights that are NaN or infinite when they are read, naming the tensor in the file.

use formats::{Error, Hint, NotFinite, Origin, Setting, Tensors, shape};
use program::Weight;

/// The error for a weight with a non-finite element `found`.
pub(crate) fn refusal(weight: &Weight, tensors: &Tensors, found: NotFinite) -> Error {
    let origin = weight.source.origin(tensors, found.element).ok().flatten();
    // A weight that no single tensor holds is named as itself.
    let origin = origin.unwrap_or_else(|| Origin {
        tensor: weight.name.clone(),
        shape: weight.shape.clone(),
        element: found.element,
    });
    let file = tensors.get(&origin.tensor).and_then(|tensor| tensors.file(&tensor));
    let place = format!("{}: {}", file.unwrap_or(tensors.path()).display(), origin.tensor);
    let found = format!("{found} in {}", position(&origin, found.shared));
    let error = Error::new(place, "finite weights", found);
    let hint = Hint::text("download the file again, or convert it anew; ");
    error.hint(hint.with(Setting::AllowNan).and(" loads it as it is"))
}

/// Where the element is in its tensor. Elements of one block that share a scale are named as a
/// range.
fn position(origin: &Origin, shared: usize) -> String {
    let element = origin.element;
    let &[ref outer @ .., rows, cols] = origin.shape.as_slice() else {
        return format!("element {element}");
    };
    let (rows, cols) = (rows.max(1), cols.max(1));
    let matrix = match outer {
        [] => String::new(),
        _ => format!("matrix {} of {}, ", element / cols / rows, shape(outer)),
    };
    let (row, column) = (element / cols % rows, element % cols);
    match shared {
        1 => format!("{matrix}row {row}, column {column}"),
        _ => format!("{matrix}row {row}, columns {column} to {}", column + shared - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_is_that_in_the_tensor() {
        for (shape, element, shared, expected) in [
            (vec![8, 64], 0, 1, "row 0, column 0"),
            (vec![8, 64], 130, 1, "row 2, column 2"),
            (vec![8, 64], 96, 32, "row 1, columns 32 to 63"),
            (vec![3, 8, 64], 2 * 512 + 130, 1, "matrix 2 of [3], row 2, column 2"),
            (vec![64], 7, 1, "element 7"),
        ] {
            let origin = Origin { tensor: "w".into(), shape, element };
            assert_eq!(position(&origin, shared), expected);
        }
    }
}
