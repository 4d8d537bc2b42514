//! Losses of preferences, and their gradients.

use super::*;

/// As TRL computes them, with a reference of no adapter, or none.
#[test]
fn preferences_by_every_loss() {
    for (name, objective) in [
        ("llama3-dpo", DPO),
        ("llama3-hinge", Objective::Hinge { beta: 0.3 }),
        ("llama3-ipo", Objective::Ipo { beta: 0.3 }),
        ("llama3-simpo", Objective::SimPo { beta: 0.3, gamma: 0.2 }),
        ("llama3-orpo", Objective::Orpo { beta: 0.3 }),
    ] {
        let case = Case::open(name);
        let mut model = Preference::new(case.lora(Some(2)), objective).unwrap();
        let (mut gradients, batch) = (zeros(&model), case.batch());
        let loss = model.gradients(&batch, &mut gradients).unwrap();
        let want = case.doubles("loss")[0];
        assert!((loss.sum - want).abs() < BOUND * want, "{name}: {} {want}", loss.sum);
        assert_eq!((model.loss(&batch).unwrap(), loss.weight), (loss, 2.0));
        compare("gradient", model.parameters(), &gradients, &case);
        // All weights, too, where nothing is compared with the model as it was.
        let full = Preference::new(case.full(Some(1)), objective);
        assert_eq!(full.is_err(), objective.has_base(), "{name}");
    }
}

/// As TRL computes it: a desired answer and another one, each with an answer to another prompt.
#[test]
fn judged_answers() {
    let case = Case::open("llama3-kto");
    let objective = Objective::Kto { beta: 0.3, weights: [1.3, 0.7] };
    let mut model = Preference::new(case.lora(Some(2)), objective).unwrap();
    let batch = Batch { desired: vec![true, false], ..case.batch() };
    let mut gradients = zeros(&model);
    let loss = model.gradients(&batch, &mut gradients).unwrap();
    let want = case.doubles("loss")[0];
    assert!((loss.sum - want).abs() < BOUND * want, "{} {want}", loss.sum);
    assert_eq!((model.loss(&batch).unwrap(), loss.weight), (loss, 2.0));
    compare("gradient", model.parameters(), &gradients, &case);
    // The answers to other prompts count: with the others exchanged the loss is another.
    let mut others = batch.clone();
    others.weights[19..32].fill(0.0);
    let without = model.loss(&others).unwrap();
    assert!((without.sum - loss.sum).abs() > 1e-3, "{} {}", without.sum, loss.sum);
    let error = model.loss(&case.batch()).unwrap_err().to_string();
    assert!(error.contains("2 labels"), "{error}");
    let full = Preference::new(case.full(Some(1)), objective).err().unwrap().to_string();
    assert!(full.contains("all weights"), "{full}");
    for wrong in [[-1.0, 1.0], [1.0, f64::NAN]] {
        let objective = Objective::Kto { beta: 0.3, weights: wrong };
        assert!(Preference::new(case.lora(Some(1)), objective).is_err());
    }
}

#[test]
fn preferences() {
    let case = Case::open("llama3-dpo");
    let (mut model, batch) = (Preference::new(case.lora(Some(2)), DPO).unwrap(), case.batch());
    let loss = model.loss(&batch).unwrap();
    let want = loss.sum;
    // Pairs by themselves add up to the same.
    let mut sum = delft_train::Loss::default();
    for rows in [0..32, 32..60] {
        let first = rows.start;
        let own = batch.sequences.iter().filter(|sequence| rows.contains(&sequence.start));
        let part = Batch {
            tokens: batch.tokens[rows.clone()].to_vec(),
            targets: batch.targets[rows.clone()].to_vec(),
            weights: batch.weights[rows.clone()].to_vec(),
            sequences: own.map(|own| own.start - first..own.end - first).collect(),
            ..Batch::default()
        };
        sum += model.loss(&part).unwrap();
    }
    assert!((sum.sum - loss.sum).abs() < 1e-5 * want);
    let mut odd = batch;
    odd.sequences = vec![0..19, 19..32, 32..60];
    let error = model.loss(&odd).unwrap_err().to_string();
    assert!(error.contains("a chosen and a rejected sequence in turn"), "{error}");
    let full = case.full(Some(1));
    let error = Preference::new(full, DPO).err().unwrap().to_string();
    assert!(error.contains("all weights"), "{error}");
    assert!(Preference::new(case.lora(Some(1)), Objective::Dpo { beta: 0.0 }).is_err());
}

/// Margins are measured from the adapter that was gone on from, which stays as it was.
#[test]
fn preferences_over_an_adapter() {
    for (name, hardware) in [
        ("llama3-dpo", Hardware::from(Some(1))),
        ("llama3-dora", Some(1).into()),
        ("llama3-dora", Hardware { place: "sim".parse().unwrap(), ..Some(1).into() }),
    ] {
        let case = Case::open(name);
        let batch = case.batch();
        let mut model = case.lora(hardware);
        let before = model.sequence_losses(&batch).unwrap();
        model.rebase().unwrap();
        let mut preference = Preference::new(model, DPO).unwrap();
        // Answers are as likely as before.
        assert!(preference.margins(&batch).unwrap().iter().all(|margin| margin.abs() < 1e-5));
        for parameter in preference.parameters_mut() {
            parameter.values.iter_mut().for_each(|value| *value *= 1.5);
        }
        let margins = preference.margins(&batch).unwrap();
        let mut changed = case.lora(hardware);
        for parameter in changed.parameters_mut() {
            parameter.values.iter_mut().for_each(|value| *value *= 1.5);
        }
        let after = changed.sequence_losses(&batch).unwrap();
        let pairs = before.chunks_exact(2).zip(after.chunks_exact(2));
        for (margin, (before, after)) in margins.iter().zip(pairs) {
            let want = (after[1] - after[0]) - (before[1] - before[0]);
            assert!((margin - want).abs() < 1e-4 && want.abs() > 1e-3, "{name}: {margin} {want}");
        }
    }
}
