/* Stands in for Pyxis: Slurm takes its options, and a task finds in its environment what they said. */
#include <stddef.h>
#include <string.h>

#include <slurm/spank.h>

SPANK_PLUGIN(bed_containers, 1)

static int take(int which, const char *value, int remote);

struct spank_option spank_options[] = {
    {"container-image", "IMAGE", "the image to run in", 1, 0, take},
    {"container-mounts", "FROM:TO,...", "folders seen inside", 1, 1, take},
    {"container-name", "NAME", "a container to keep", 1, 2, take},
    {"container-workdir", "FOLDER", "where to start inside", 1, 3, take},
    {"container-writable", NULL, "let the image be written into", 0, 4, take},
    {"no-container-mount-home", NULL, "leave the home folder out", 0, 5, take},
    SPANK_OPTIONS_TABLE_END};

static const char *names[] = {"BED_CONTAINER_IMAGE",   "BED_CONTAINER_MOUNTS",
                              "BED_CONTAINER_NAME",    "BED_CONTAINER_WORKDIR",
                              "BED_CONTAINER_WRITABLE", "BED_CONTAINER_NO_HOME"};
static const char *given[6];

static int take(int which, const char *value, int remote) {
    given[which] = value ? strdup(value) : "1"; /* Slurm takes its text back */
    return 0;
}

int slurm_spank_task_init(spank_t job, int count, char **words) {
    for (int which = 0; which < 6; which++)
        if (given[which]) spank_setenv(job, names[which], given[which], 1);
    return 0;
}
