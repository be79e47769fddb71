from .resume_cases import _in_a_folder_of_its_own, quick, whole  # noqa: F401
