"""`wsi-mil import`: bags of another form -> bags, a table of labels and, where the form has them, folds."""

from pathlib import Path

from wsi_mil.errors import StoreError
from wsi_mil.interop import Imported, read_foreign
from wsi_mil.outcomes import Failure, Summary
from wsi_mil.progress import progress
from wsi_mil.runs import write_frame
from wsi_mil.store import BagStore, write_bag


def import_bags(source: Path, *, out: Path) -> Summary:
    """Bring bags of another form into a study: bags, labels.csv and, where there are any, folds.csv.

    Bags that are there already are kept, so the same command goes on after an interruption. A folder that holds bags
    of the same names from another source is refused.

    Args:
        source: file to read, such as a classic MIL set (npz)
        out: folder to write
    """
    found = read_foreign(source)
    bags = out / "bags"
    store = BagStore(bags) if bags.is_dir() else None
    there = _those_there(found, store) if store else set()
    done, reused, failures = [], [], []
    with progress("importing", len(found.table)) as bar:
        for bag in found.bags():
            name = bag.header.slide_id
            bar.advance(1, name)
            if name in there:
                reused.append(name)
                continue
            try:
                place = bags / f"{name}.h5"
                write_bag(place, bag.header, features=bag.features, coords_l0=bag.coords_l0, grid_xy=bag.grid_xy)
                done.append(name)
            except ValueError as error:
                failures.append(Failure(item=name, outcome="failed", reason=str(error)))
    write_frame(out / "labels.csv", found.table)
    if found.folds is not None:
        write_frame(out / "folds.csv", found.folds)
    folds = f" --folds.file {out / 'folds.csv'}" if found.folds is not None else ""
    following = f"wsi-mil crossval {out / 'labels.csv'} --bags {bags} --target label{folds} --methods abmil --out RUN"
    return Summary(
        stage="import",
        out=out,
        done=tuple(done),
        reused=tuple(reused),
        failures=tuple(failures),
        notes=(*(f"Not known: {text}." for text in found.unknown), f"Next: {following}"),
    )


def _those_there(found: Imported, store: BagStore) -> set[str]:
    """The bags that were imported before. Raises StoreError, before anything is written, where one is another's."""
    there = set(store.ids())
    for bag in found.bags():
        name = bag.header.slide_id
        if name in there and store.header(name).params_digest != bag.header.params_digest:
            raise StoreError(
                f"{store.path(name)} is there already and comes from another source or another version of it. Give "
                f"another --out, or remove that folder yourself."
            )
    return there
