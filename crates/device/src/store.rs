//! The weights that a device holds, apart from the Programs that use them. A second Program over
//! the same files finds here what the first has read, so weights are read once and take memory
//! once. A weight is freed with the last Program that uses it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use formats::{Identity, Tensors};
use program::Weight;

/// Packed weights `W`. A form `F` tells apart ways to pack the same weight.
pub(crate) struct Store<F, W> {
    /// By their names in Programs; entries do not keep weights alive.
    held: Mutex<HashMap<String, Vec<Held<F, W>>>>,
}

struct Held<F, W> {
    files: Identity,
    weight: Weight,
    form: F,
    /// Whether all its numbers are known to be finite.
    finite: bool,
    /// Bytes of memory.
    bytes: usize,
    packed: Weak<W>,
}

/// The part of a store that serves Programs of some files.
pub(crate) struct Wanted<'a, F, W> {
    store: &'a Store<F, W>,
    /// The files; `None` if the system cannot identify them, and then nothing is shared.
    files: Option<Identity>,
    /// Whether weights must be finite.
    finite: bool,
}

impl<F, W> Default for Store<F, W> {
    fn default() -> Self {
        Store { held: Mutex::default() }
    }
}

impl<F: PartialEq, W> Store<F, W> {
    /// The part that serves Programs over `tensors`, whose weights must be finite unless
    /// `allow_nan` is set.
    pub(crate) fn of(&self, tensors: &Tensors, allow_nan: bool) -> Wanted<'_, F, W> {
        Wanted { store: self, files: tensors.identity(), finite: !allow_nan }
    }

    /// Bytes counted more than once if each Program counts every weight that it uses.
    pub(crate) fn shared(&self) -> usize {
        let held = self.held();
        let all = held.values().flatten();
        all.map(|held| held.packed.strong_count().saturating_sub(1) * held.bytes).sum()
    }

    fn held(&self) -> MutexGuard<'_, HashMap<String, Vec<Held<F, W>>>> {
        // A panic cannot leave the map half-changed.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<F: PartialEq, W> Wanted<'_, F, W> {
    /// A weight that another Program uses, if it is held in this form.
    pub(crate) fn find(&self, weight: &Weight, form: &F) -> Option<Arc<W>> {
        let files = self.files.as_ref()?;
        let held = self.store.held();
        let same = |held: &&Held<F, W>| {
            let good = held.finite || !self.finite;
            good && held.files == *files && held.form == *form && held.weight == *weight
        };
        held.get(&weight.name)?.iter().filter(same).find_map(|held| held.packed.upgrade())
    }

    /// Offers a weight that was read to later Programs, for as long as one uses it.
    pub(crate) fn keep(&self, weight: &Weight, form: F, bytes: usize, packed: &Arc<W>) {
        let Some(files) = self.files.clone() else { return };
        let (weight, finite, packed) = (weight.clone(), self.finite, Arc::downgrade(packed));
        let name = weight.name.clone();
        let one = Held { files, weight, form, finite, bytes, packed };
        self.store.held().entry(name).or_default().push(one);
    }

    /// Removes the entries of weights that no Program uses any more.
    pub(crate) fn prune(&self) {
        self.store.held().retain(|_, all| {
            all.retain(|held| held.packed.strong_count() > 0);
            !all.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_is_shared_by_recipe_form_and_files_and_goes_with_its_last_user() {
        let folder = tempfile::tempdir().unwrap();
        let open = |name: &str, value: f32| {
            let path = folder.path().join(name);
            let bytes: Vec<u8> = [value; 4].iter().flat_map(|x| x.to_le_bytes()).collect();
            let header = r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#;
            let mut file = (header.len() as u64).to_le_bytes().to_vec();
            file.extend(header.as_bytes());
            file.extend(bytes);
            std::fs::create_dir_all(&path).unwrap();
            std::fs::write(path.join("model.safetensors"), file).unwrap();
            std::fs::write(path.join("config.json"), "{}").unwrap();
            Tensors::open(path).unwrap()
        };
        let (one, other) = (open("one", 1.0), open("other", 1.0));
        let source = formats::Source::Tensor("a".to_owned());
        let weight = Weight { name: "norm".to_owned(), shape: vec![4], source };
        let renamed = Weight { name: "head".to_owned(), ..weight.clone() };
        let store: Store<u8, Vec<f32>> = Store::default();
        let wanted = store.of(&one, false);
        assert!(wanted.find(&weight, &1).is_none());
        let made = Arc::new(vec![1.0; 4]);
        wanted.keep(&weight, 1, 16, &made);
        let again = Tensors::open(one.path()).unwrap();
        for (tensors, weight, form, allow_nan, expected) in [
            (&again, &weight, 1, false, true),
            (&again, &weight, 1, true, true),
            (&again, &weight, 2, false, false),
            (&again, &renamed, 1, false, false),
            (&other, &weight, 1, false, false),
        ] {
            let found = store.of(tensors, allow_nan).find(weight, &form);
            assert_eq!(found.is_some(), expected, "{} {form}", weight.name);
        }
        // Nobody looked whether it is finite.
        let unchecked = store.of(&one, true);
        unchecked.keep(&renamed, 1, 16, &made);
        assert!(unchecked.find(&renamed, &1).is_some() && wanted.find(&renamed, &1).is_none());
        assert_eq!(store.shared(), 0);
        let second = wanted.find(&weight, &1).unwrap();
        // Two names of one value: each counts it.
        assert_eq!(store.shared(), 2 * 16);
        drop((made, second));
        assert!(wanted.find(&weight, &1).is_none());
        assert_eq!(store.shared(), 0);
        wanted.prune();
        assert!(store.held().is_empty());
    }
}
