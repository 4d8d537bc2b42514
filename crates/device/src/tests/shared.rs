//! Two Programs over one store of weights: one ends in logits, the other in hidden states.

use models::Ending;

use super::*;

fn program(tensors: &Tensors, ending: Ending) -> Program {
    let options = models::ReadOptions { ending, ..models::ReadOptions::default() };
    program::fuse(&models::load(tensors, &options).unwrap().record(false).unwrap())
}

/// Options for one sequence, or for so many that a GPU joins the matrices of a layer's projections.
fn options(program: &Program, many: bool) -> ExecutorOptions {
    let one = vec![1; program.groups().len()];
    let sequences = if many { 48 } else { 1 };
    let (cache_type, rows) = (if many { CacheType::BF16 } else { CacheType::F32 }, (48, 48));
    let (blocks, context, batched) = (vec![sequences; one.len()], one, many);
    let usual = ExecutorOptions::default();
    ExecutorOptions { cache_type, rows, blocks, context, sequences, batched, ..usual }
}

/// Two simulated GPUs that share every layer.
const RANKS: &str = "ranks";

/// The simulated GPU with many sequences.
const MANY: &str = "sim, many";

/// The last row of a prompt, and the row of a token that is decoded behind it.
fn rows(executor: &mut dyn Executor, program: &Program) -> Vec<Vec<f32>> {
    let tables = vec![Table { blocks: &[0], oldest: 0 }; program.groups().len()];
    let tokens: Vec<u32> = (3..13).collect();
    let mut row = |kind, range: std::ops::Range<usize>| {
        let sequences = [Sequence::new(range.len(), range.start, &tables)];
        let (outputs, tokens) = (&[range.len() as u32 - 1], &tokens[range]);
        let step = Step { kind, tokens, sequences: &sequences, outputs, input: &[] };
        let ticket = executor.submit(&step).unwrap();
        executor.read(ticket, 0).unwrap().to_vec()
    };
    vec![row(StepKind::Prompt, 0..9), row(StepKind::Decode, 9..10)]
}

#[test]
fn weights_of_two_programs_are_read_and_counted_once() {
    let places = ["cpu", "sim", "sim,sim"].map(|name| name.parse::<DeviceSpec>().unwrap());
    let open = |place: DeviceSpec| place.open(Some(2)).unwrap();
    let mut opened = Vec::from(places.map(|place| (place.to_string(), open(place), open(place))));
    let several: DeviceSpec = "sim,sim".parse().unwrap();
    let [one, other] = [several, several].map(|place| place.open_ranks().unwrap());
    opened.push((RANKS.to_owned(), one, other));
    opened.push((MANY.to_owned(), open(places[1]), open(places[1])));
    // Some heads have a matrix of their own, some are the table of embeddings.
    for name in ["qwen3-untied", "llama3"] {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/models");
        let tensors = Tensors::open(root.join(name)).unwrap();
        let [logits, hidden] =
            [Ending::Logits, Ending::Hidden].map(|ending| program(&tensors, ending));
        for (place, device, alone) in &opened {
            let many = place == MANY;
            // Three heads cannot be shared; matrices of 32 bits are not joined.
            if (place == RANKS && name == "qwen3-untied") || (many && name == "llama3") {
                continue;
            }
            let load = |device: &dyn Device, program: &Program| {
                let mut told = Vec::new();
                let progress = &mut |done, all| told.push((done, all));
                let loaded =
                    device.load(program.clone(), &tensors, options(program, many), progress);
                assert!(told.last().is_some_and(|(done, all)| done == all), "{told:?}");
                loaded.unwrap()
            };
            let plan = |program: &Program| -> usize {
                let plans = device.plan(program, &tensors, &options(program, many)).unwrap();
                plans.iter().map(|plan| plan.weights).sum()
            };
            let (whole, own) = (plan(&logits), plan(&hidden));
            let mut generates = load(&**device, &logits);
            let active = |executor: &dyn Executor| executor.memory().device.map(|own| own.active);
            let expected = rows(&mut *generates, &logits);
            let before = active(&*generates);
            assert!(device.shared() == 0 && plan(&logits) == 0, "{name} {place}");
            // A norm that is fused into a head is another recipe.
            let further = plan(&hidden);
            assert!(further < own / 4, "{name} {place}: {further} of {own}");
            let mut embeds = load(&**device, &hidden);
            let both = generates.memory().weights + embeds.memory().weights - device.shared();
            assert_eq!(both, whole + further, "{name} {place}");
            let mut others = [load(&**alone, &logits), load(&**alone, &hidden)];
            let [logits_alone, hidden_alone] = &mut others;
            assert_eq!(expected, rows(&mut **logits_alone, &logits));
            assert_eq!(rows(&mut *embeds, &hidden), rows(&mut **hidden_alone, &hidden));
            // Either may go first; what is left is as it was.
            drop(embeds);
            assert_eq!((device.shared(), active(&*generates)), (0, before));
            assert_eq!(rows(&mut *generates, &logits), expected);
            drop(generates);
            assert_eq!((plan(&logits), device.shared()), (whole, 0), "{name} {place}");
        }
    }
}
