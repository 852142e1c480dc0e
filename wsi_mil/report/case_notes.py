"""What is said once about the pictures of all worst cases."""

from collections.abc import Iterable

from wsi_mil.report.pictures import Case


def pictures_note(cases: Iterable[Case], *, external: bool) -> str:
    """What heat maps, boxes and tiles are; why there is none where nothing can be drawn."""
    pictures = [case.picture for case in cases if case.picture is not None]
    if not pictures:
        return (
            "No picture is shown: the bags of these patients were not made from slides, or no slide of theirs is known."
        )
    whose = "all models together" if external else "a model that never saw the patient"
    note = (
        f"Heat maps and tiles are of {whose}. Orange boxes, 1 to 4: the tiles with the highest score, of which the "
        f"heat map is made; blue boxes, a to d: the lowest."
    )
    bare = sum(not picture.thumbnail for picture in pictures)
    if not bare:
        return note
    which = (
        "The slide files are" if bare == len(pictures) else f"The slide files of {bare} of {len(pictures)} cases are"
    )
    return (
        f"{note} {which} not reachable, or not the ones that were scored, so no tissue is shown of them. If they lie "
        f"elsewhere, give wsi-mil report RUN --slides DIR, RUN being the folder of this report."
    )
