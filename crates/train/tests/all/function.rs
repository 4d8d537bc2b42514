//! Functions of arrays and their derivatives.

use delft_train::function::{Function, Unary, jvp, value_and_grad, vjp};

const ARGUMENTS: [(&str, &[usize]); 5] =
    [("x", &[3, 4]), ("norm", &[4]), ("up", &[6, 4]), ("bias", &[6]), ("down", &[2, 6])];

/// Three rows through a norm and two matrices.
fn network() -> Function {
    Function::record(&ARGUMENTS, |given| {
        let norm = nn::Norm::rms(given.builder(), "norm", 4, 1e-5)?;
        let x = norm.forward(&given.rows("x")?);
        given.linear(&given.linear(&x, "up", Some("bias"))?.map(Unary::Silu), "down", None)
    })
    .unwrap()
}

/// Elements that differ, for each argument.
fn elements(by: usize) -> Vec<Vec<f32>> {
    let each = ARGUMENTS.iter().enumerate().map(|(at, (_, shape))| {
        let count: usize = shape.iter().product();
        (0..count).map(|i| ((i * by + 7 * at + 3) % 19) as f32 / 10.0 - 0.85).collect()
    });
    each.collect()
}

fn slices(of: &[Vec<f32>]) -> Vec<&[f32]> {
    of.iter().map(Vec::as_slice).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

#[test]
fn both_modes_are_each_others_transpose() {
    let (f, names) = (network(), ARGUMENTS.map(|(name, _)| name));
    let (at, along) = (elements(5), elements(11));
    let cotangents = [0.5, -1.0, 0.25, 2.0, -0.75, 1.5];
    let (value, tangent) = jvp(&f, &names).unwrap().call(&slices(&at), &slices(&along)).unwrap();
    let (again, back) = vjp(&f, &names).unwrap().call(&slices(&at), &cotangents).unwrap();
    assert_eq!((&value, &again), (&f.call(&slices(&at)).unwrap(), &value));
    let forward = dot(&tangent, &cotangents);
    let reverse: f64 = back.iter().zip(&along).map(|(back, along)| dot(back, along)).sum();
    assert!((forward - reverse).abs() < 1e-5 * forward.abs().max(1.0), "{forward} {reverse}");
}

#[test]
fn gradients_are_slopes_and_stay_when_computed_again() {
    let f = network();
    let both = value_and_grad(&f, &["down", "x"]).unwrap();
    let (at, along) = (elements(5), elements(3));
    let (value, gradients) = both.call(&slices(&at)).unwrap();
    assert_eq!(both.checkpointed().call(&slices(&at)).unwrap(), (value, gradients.clone()));
    for (argument, gradient) in [(4, &gradients[0]), (0, &gradients[1])] {
        let moved = |by: f32| {
            let mut at = at.clone();
            at[argument].iter_mut().zip(&along[argument]).for_each(|(to, along)| *to += by * along);
            f.call(&slices(&at)).unwrap().iter().map(|y| f64::from(*y)).sum::<f64>()
        };
        let slope = (moved(1e-3) - moved(-1e-3)) / 2e-3;
        let own = dot(gradient, &along[argument]);
        assert!((slope - own).abs() < 2e-3 * own.abs().max(1.0), "{slope} {own}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let f = network();
    let error = value_and_grad(&f, &["across"]).unwrap_err().to_string();
    assert!(error.contains("across"), "{error}");
    let mut short = elements(5);
    short[2].pop();
    let error = f.call(&slices(&short)).unwrap_err().to_string();
    assert!(error.contains("up") && error.contains("24 elements"), "{error}");
    assert!(f.call(&slices(&short)[1..]).is_err());
    let record = |arguments: &[(&str, &[usize])]| {
        let f = Function::record(arguments, |given| given.linear(&given.rows("x")?, "w", None));
        f.unwrap_err().to_string()
    };
    assert!(record(&[("x", &[2, 3])]).contains("w"));
    assert!(record(&[("x", &[2, 3]), ("x", &[2, 3])]).contains("names of their own"));
    assert!(record(&[("x", &[2, 3]), ("w", &[4, 2])]).contains("linear"));
    assert!(record(&[("x", &[3]), ("w", &[4, 3])]).contains("[rows, width]"));
}

/// The mean squared error of predictions, and how it changes with them.
#[test]
fn squared_errors_have_gradients() {
    let shape: &[usize] = &[2, 3];
    let f = Function::record(&[("predicted", shape), ("wanted", shape)], |given| {
        let gap = given.rows("predicted")?.add(&given.rows("wanted")?.scale(-1.0));
        Ok(gap.mul(&gap).scale(1.0 / 6.0))
    });
    let (x, y) = ([0.5, -1.0, 2.0, 0.25, 1.5, -0.75], [1.0, -0.5, 1.0, 0.0, 1.5, 0.25]);
    let both = value_and_grad(&f.unwrap(), &["predicted"]).unwrap();
    let (value, gradients) = both.call(&[&x, &y]).unwrap();
    let gaps = x.iter().zip(y).map(|(x, y)| x - y);
    let mean = gaps.clone().map(|gap: f32| gap * gap).sum::<f32>() / 6.0;
    assert!((value - mean).abs() < 1e-6, "{value} {mean}");
    for (found, gap) in gradients[0].iter().zip(gaps) {
        assert!((found - gap / 3.0).abs() < 1e-6, "{found} {gap}");
    }
}
